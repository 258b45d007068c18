"""HyperFL with one frozen embedding for all: the generated feature extractor is averaged."""

from hyperfl_flwr.core.method import Method, Upload
from hyperfl_flwr.core.tasks import ALL_TASKS
from hyperfl_flwr.methods.hyperfl import HyperFLConfig

METHOD = Method(
    name="hyperfl-frozen",
    title="HyperFL with one frozen embedding for all: the generated feature extractor is averaged",
    paper="Guo et al., AAAI 2025",
    sends="the generated feature extractor",
    keeps="the classifier",
    uploads=(Upload(part="extractor", form="values"),),
    learning_rate=0.003,
    client="clients.hyperfl_frozen:HyperFLFrozenClient",
    strategy="strategies.hyperfl:HyperFLFrozen",
    tasks=ALL_TASKS,
    settings=(HyperFLConfig,),
    private_classifier=True,
)
