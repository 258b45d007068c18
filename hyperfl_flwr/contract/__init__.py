"""The contract of a method: what it must hold on small federations, for `hyperfl check-method` and for the tests."""

import hyperfl_flwr.core.packages.guard_app  # noqa: F401 - must run before the packages that it guards are imported
