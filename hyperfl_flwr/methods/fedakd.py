"""FedAKD: clients exchange logits on public samples instead of parameters."""

from typing import ClassVar

from hyperfl_flwr.core.method import Method
from hyperfl_flwr.core.settings import NonNegative, Positive, PositiveFloat, Section, ShareBelowOne, setting


class FedAKDConfig(Section):
    """Settings of FedAKD."""

    key: ClassVar[str] = "fedakd"
    title: ClassVar[str] = "FedAKD"

    unlabelled: str = setting(
        "noise",
        "The public samples, which every client has: `noise`, or the name of a data set, `npz:FILE`, "
        "`csv:FILE` or `folder:PATH`, of which labels are not used. Samples must have the shape of the clients'.",
        values="`noise`, a data set",
    )
    samples: NonNegative = setting(200, "Number of public samples; 0 exchanges nothing, which is `local`.")
    held_back: ShareBelowOne = setting(
        0.1,
        "Share of a client's training samples, at least one and at most all but one, that are not trained on: the "
        "accuracy on them is the weight of its logits. 0, and with `dp.epsilon` always: all samples are trained on, "
        "and all weights are equal.",
    )
    digest_epochs: Positive = setting(1, "Passes over the public samples that move a client towards the mean logits.")
    digest_learning_rate: PositiveFloat = setting(0.05, "Learning rate of these passes.")


METHOD = Method(
    name="fedakd",
    title="clients exchange logits on public samples, and no parameters",
    paper="Gad and Fadlullah, Sensors 2023",
    sends="logits on public samples",
    keeps="the model",
    uploads=(),
    learning_rate=0.1,
    client="clients.fedakd:FedAKDClient",
    strategy="strategies.fedakd:FedAKD",
    settings=(FedAKDConfig,),
)
