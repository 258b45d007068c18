"""Record a round and attack it with the knowledge of the server."""

import hyperfl_flwr.core.packages.guard_app  # noqa: F401 - before what it guards
