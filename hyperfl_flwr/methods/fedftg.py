"""FedFTG: the server fine-tunes the mean model on images of a generator, with the clients' models as teachers."""

from typing import Annotated, ClassVar

from pydantic import Field

from hyperfl_flwr.core.method import Method, Upload
from hyperfl_flwr.core.settings import NonNegative, NonNegativeFloat, Positive, PositiveFloat, Section, setting


class FedFTGConfig(Section):
    """Settings of FedFTG."""

    key: ClassVar[str] = "fedftg"
    title: ClassVar[str] = "FedFTG"

    iterations: NonNegative = setting(10, "Number of the server's iterations in each round; 0 is `fedavg`.")
    student_steps: NonNegative = setting(5, "Number of steps of the model in each iteration.")
    batch_size: Annotated[int, Field(ge=2)] = setting(50, "Number of generated images per iteration.")
    generator_width: Positive = setting(16, "Number of the generator's feature maps; 64 in the paper.")
    generator_learning_rate: PositiveFloat = setting(0.01, "Learning rate of the generator's Adam in the first round.")
    student_learning_rate: PositiveFloat = setting(
        0.1, "Learning rate of the model's SGD on the server in the first round."
    )
    student_weight_decay: NonNegativeFloat = setting(1e-3, "L2 coefficient of the model's steps on the server.")
    decay: Annotated[float, Field(gt=0, le=1)] = setting(0.998, "Factor of both rates after each round.")
    diversity: NonNegativeFloat = setting(1.0, "Weight of the term that makes generated images differ.")


METHOD = Method(
    name="fedftg",
    title="federated averaging; the server fine-tunes the mean on images of a generator",
    paper="Zhang et al., CVPR 2022",
    sends="the whole model, alone, and the number of samples of each class",
    keeps="nothing",
    uploads=(Upload(part="model", form="values"),),
    learning_rate=0.05,
    client="clients.fedftg:FedFTGClient",
    strategy="strategies.fedftg:FedFTG",
    settings=(FedFTGConfig,),
)
