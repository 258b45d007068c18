"""Membership inference as a game, and the bound on epsilon that it measures."""

import hyperfl_flwr.core.packages.guard_app  # noqa: F401 - before what it guards
