"""Plan, start and follow runs on this machine."""

import hyperfl_flwr.core.packages.guard_app  # noqa: F401 - must run before the packages that it guards are imported
