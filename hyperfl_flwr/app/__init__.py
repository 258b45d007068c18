"""The Flower app: where both sides of a method meet."""

import hyperfl_flwr.core.guard_app  # noqa: F401 - before what it guards
