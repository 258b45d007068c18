"""FedAvg: the whole model is averaged."""

from hyperfl_flwr.core.method import Method, Upload
from hyperfl_flwr.core.tasks import ALL_TASKS

METHOD = Method(
    name="fedavg",
    title="federated averaging of the whole model",
    paper="McMahan et al., AISTATS 2017",
    sends="the whole model",
    keeps="nothing",
    uploads=(Upload(part="model", form="values"),),
    learning_rate=0.05,
    client="clients.fedavg:FedAvgClient",
    strategy="strategies.fedavg:FedAvg",
    tasks=ALL_TASKS,
)
