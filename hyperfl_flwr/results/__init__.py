"""Uses of a finished run: report, export, join, personalize."""
