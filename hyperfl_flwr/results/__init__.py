"""Use a finished run: report, export, join, personalize."""

import hyperfl_flwr.core.packages.guard_app  # noqa: F401 - must run before the packages that it guards are imported
