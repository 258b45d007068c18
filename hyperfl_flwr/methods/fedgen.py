"""FedGen: a generator of features on the server, with which clients train in addition to their data."""

from typing import Annotated, ClassVar

from pydantic import Field

from hyperfl_flwr.core.method import Method, Upload
from hyperfl_flwr.core.settings import NonNegative, NonNegativeFloat, Positive, PositiveFloat, Section, setting


class FedGenConfig(Section):
    """Settings of FedGen."""

    key: ClassVar[str] = "fedgen"
    title: ClassVar[str] = "FedGen"

    generated_weight: NonNegativeFloat = setting(
        10.0,
        "Weight of the clients' loss on generated features, in the first round; it is multiplied by the ratio of "
        "`fedgen.generated-samples` to `batch-size`.",
    )
    latent_weight: NonNegativeFloat = setting(
        10.0,
        "Weight, in the first round, of the divergence of the clients' predictions from those on generated features of "
        "the same label. With both weights 0 the model is `fedavg`'s.",
    )
    decay: Annotated[float, Field(gt=0, le=1)] = setting(
        0.98, "Factor of both weights and of the generator's rate after each round."
    )
    generated_samples: Annotated[int, Field(ge=2)] = setting(
        32, "Number of generated features in a step, on the server and on the clients."
    )
    generator_width: Positive = setting(256, "Number of the generator's hidden units.")
    generator_steps: NonNegative = setting(50, "Number of the generator's steps in each round.")
    generator_learning_rate: PositiveFloat = setting(3e-4, "Learning rate of the generator's Adam in the first round.")
    diversity: NonNegativeFloat = setting(1.0, "Weight of the term that makes generated features differ.")


METHOD = Method(
    name="fedgen",
    title="federated averaging; a generator of features, trained on the server, regularises local training",
    paper="Zhu et al., ICML 2021",
    sends="the whole model, its classifier alone, and the number of samples of each class",
    keeps="nothing",
    uploads=(Upload(part="model", form="values"),),
    learning_rate=0.01,
    client="clients.fedgen:FedGenClient",
    strategy="strategies.fedgen:FedGen",
    settings=(FedGenConfig,),
)
