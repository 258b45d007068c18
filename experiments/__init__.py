"""Studies: run many settings, and make tables and figures of the results."""

import hyperfl_flwr.core.packages.guard_all  # noqa: F401 - before what it guards
