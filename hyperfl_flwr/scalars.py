"""What a setting may be, in a module that imports nothing: commands that need no more begin at once."""

Scalar = str | int | float | bool
"""What a run-config value may be (Flower's `UserConfigValue`)."""
