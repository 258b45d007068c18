"""LG-FedAvg: the classifier is averaged, the feature extractors stay on the clients."""

from hyperfl_flwr.core.method import Method, Upload
from hyperfl_flwr.core.tasks import ALL_TASKS

METHOD = Method(
    name="lg-fedavg",
    title="averaging of the classifier; the feature extractor stays private",
    paper="Liang et al., 2020",
    sends="the classifier",
    keeps="the feature extractor",
    uploads=(Upload(part="classifier", form="values"),),
    learning_rate=0.05,
    client="clients.lg_fedavg:LGFedAvgClient",
    strategy="strategies.engine.partial:Partial",
    tasks=ALL_TASKS,
)
