"""The `hyperfl` command line."""

import hyperfl_flwr.core.packages.guard_all  # noqa: F401 - must run before the packages that it guards are imported
