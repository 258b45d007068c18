"""Local-only training: nothing is shared."""

from hyperfl_flwr.core.method import Method

METHOD = Method(
    name="local",
    title="local-only training",
    paper="baseline",
    sends="nothing",
    uploads=(),
    learning_rate=0.1,
    client="clients.local:LocalClient",
    strategy="strategies.local:Local",
)
