"""PPSGD: the whole model is averaged, and each client adds a private classifier to the common one."""

from typing import ClassVar

from hyperfl_flwr.core.method import Method, Upload
from hyperfl_flwr.core.settings import PositiveFloat, Section, setting
from hyperfl_flwr.core.tasks import ALL_TASKS


class PPSGDConfig(Section):
    """Settings of PPSGD."""

    key: ClassVar[str] = "ppsgd"
    title: ClassVar[str] = "PPSGD"

    classifier_learning_rate: PositiveFloat = setting(
        0.1, "Learning rate of the private classifier; that of the shared model is `learning-rate`."
    )


METHOD = Method(
    name="ppsgd",
    title="averaging of the whole model; a private classifier is added to the common one",
    paper="Bietti et al., ICML 2022",
    sends="the whole model, without the private classifier",
    keeps="a classifier that is added to the model's",
    uploads=(Upload(part="model", form="values"),),
    learning_rate=0.05,
    client="clients.ppsgd:PPSGDClient",
    strategy="strategies.fedavg:FedAvg",
    tasks=ALL_TASKS,
    settings=(PPSGDConfig,),
    private_classifier=True,
)
