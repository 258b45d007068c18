"""The Flower app: connect the strategy and the client of a method to Flower."""

import hyperfl_flwr.core.packages.guard_app  # noqa: F401 - must run before the packages that it guards are imported
