"""The commit of an app that was handed to Flower, where no git is; written by `hyperfl_flwr.launch.app_bundle`."""

COMMIT = ""
"""With `-dirty` where files differed from it; empty in a checkout, whose git can be asked."""
