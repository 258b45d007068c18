"""FedPer: the feature extractor is averaged, the classifiers stay on the clients."""

from hyperfl_flwr.core.method import Method, Upload
from hyperfl_flwr.core.tasks import ALL_TASKS

METHOD = Method(
    name="fedper",
    title="averaging of the feature extractor, trained together with a private classifier",
    paper="Arivazhagan et al., 2019",
    sends="the feature extractor",
    keeps="the classifier",
    uploads=(Upload(part="extractor", form="values"),),
    learning_rate=0.05,
    client="clients.fedper:FedPerClient",
    strategy="strategies.engine.partial:Partial",
    tasks=ALL_TASKS,
)
