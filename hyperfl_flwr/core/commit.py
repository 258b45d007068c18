"""The git commit of an app bundle, for machines without the repository; `hyperfl_flwr.launch.app_bundle` writes it."""

COMMIT = ""
"""Commit hash, with the suffix `-dirty` if files differed from it; empty in a checkout, where git knows the commit."""
