"""The `hyperfl` command line."""

import hyperfl_flwr.core.guard_all  # noqa: F401 - must run before the packages that it guards are imported
