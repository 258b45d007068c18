"""The git commit of an app bundle, for machines without the repository; `hyperfl_flwr.launch.app_bundle` writes it."""

COMMIT = ""
"""Commit hash, with the suffix `-dirty` if files differed from it; empty in a checkout, where git knows the commit."""

SOURCE = ""
"""SHA-256 of the files that the bundle was made from, some of which it leaves out; empty outside bundles."""
