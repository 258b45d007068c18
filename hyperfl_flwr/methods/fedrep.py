"""FedRep: the feature extractor is averaged, the classifiers stay on the clients."""

from typing import ClassVar

from hyperfl_flwr.core.method import Method, Upload
from hyperfl_flwr.core.settings import NonNegativeFloat, Positive, PositiveFloat, Section, setting
from hyperfl_flwr.core.tasks import ALL_TASKS


class FedRepConfig(Section):
    """Settings of FedRep."""

    key: ClassVar[str] = "fedrep"
    title: ClassVar[str] = "FedRep"

    classifier_learning_rate: PositiveFloat = setting(
        0.1, "Learning rate of the classifier; that of the extractor is `learning-rate`."
    )
    classifier_epochs: Positive = setting(
        1, "Passes over the data that train the classifier, before `local-epochs` passes that train the extractor."
    )
    clip_norm: NonNegativeFloat = setting(0.0, "Largest gradient norm of the extractor; 0 does not clip.")


METHOD = Method(
    name="fedrep",
    title="averaging of the feature extractor; the classifier stays private",
    paper="Collins et al., ICML 2021",
    sends="the feature extractor",
    keeps="the classifier",
    uploads=(Upload(part="extractor", form="values"),),
    learning_rate=0.1,
    client="clients.fedrep:FedRepClient",
    strategy="strategies.fedrep:FedRep",
    tasks=ALL_TASKS,
    settings=(FedRepConfig,),
    private_classifier=True,
)
