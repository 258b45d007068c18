"""Local-only training: nothing is shared."""

from typing import ClassVar, Literal

from hyperfl_flwr.core.method import Method
from hyperfl_flwr.core.settings import Section, setting
from hyperfl_flwr.core.tasks import ALL_TASKS


class LocalConfig(Section):
    """Settings of local-only training."""

    key: ClassVar[str] = "local"
    title: ClassVar[str] = "Local-only training"

    trains: Literal["model", "classifier"] = setting(
        "model",
        "What a client trains. `model`: the whole network. `classifier`: its last layer, on the random initial "
        "extractor, which shows what a method gains by training the extractor at all.",
    )


METHOD = Method(
    name="local",
    title="local-only training",
    paper="baseline",
    sends="nothing",
    keeps="the model",
    uploads=(),
    learning_rate=0.1,
    client="clients.local:LocalClient",
    strategy="strategies.local:Local",
    tasks=ALL_TASKS,
    settings=(LocalConfig,),
)
