"""Uses of a finished run: report, export, join, personalize."""

import hyperfl_flwr.core.guard_app  # noqa: F401 - before what it guards
