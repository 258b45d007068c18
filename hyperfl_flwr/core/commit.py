"""The commit of an app that was handed to Flower, which has no git there; `hyperfl_flwr.launch.app_bundle` writes it."""

COMMIT = ""
"""With `-dirty` where files differed from it; empty in a checkout, whose git can be asked."""
