"""From settings to runs, and from runs to tables and figures."""

import hyperfl_flwr.core.guard_all  # noqa: F401 - before what it guards
