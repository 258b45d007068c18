"""The command line."""

import hyperfl_flwr.core.guard_all  # noqa: F401 - before what it guards
