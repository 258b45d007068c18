"""Starts, follows and sizes runs on this machine."""

import hyperfl_flwr.core.guard_app  # noqa: F401 - before what it guards
