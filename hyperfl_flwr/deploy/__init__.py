"""Deployments on machines of different owners: provision, check, run."""

import hyperfl_flwr.core.guard_app  # noqa: F401 - before what it guards
