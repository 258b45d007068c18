"""FedBN: all layers but those that normalise are averaged."""

from hyperfl_flwr.core.method import Method, Upload
from hyperfl_flwr.core.tasks import ALL_TASKS

METHOD = Method(
    name="fedbn",
    title="averaging of all layers; those that normalise stay private",
    paper="Li et al., ICLR 2021",
    sends="all layers but those that normalise",
    keeps="the normalisation layers",
    uploads=(Upload(part="layers", form="values"),),
    learning_rate=0.05,
    client="clients.fedbn:FedBNClient",
    strategy="strategies.fedbn:FedBN",
    tasks=ALL_TASKS,
)
