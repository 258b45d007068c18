"""Records a round and attacks it with what the server has."""

import hyperfl_flwr.core.guard_app  # noqa: F401 - before what it guards
