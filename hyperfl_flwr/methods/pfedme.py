"""pFedMe: personalized models within a distance of the common one, found by proximal steps."""

from typing import ClassVar

from hyperfl_flwr.core.method import Method, Upload
from hyperfl_flwr.core.settings import Positive, PositiveFloat, Section, setting
from hyperfl_flwr.core.tasks import ALL_TASKS


class PFedMeConfig(Section):
    """Settings of pFedMe."""

    key: ClassVar[str] = "pfedme"
    title: ClassVar[str] = "pFedMe"

    pull: PositiveFloat = setting(
        15.0,
        "Strength λ of the pull of a client's personalized model towards the client's copy of the common one. The "
        "paper uses 15 and more.",
    )
    inner_steps: Positive = setting(
        5, "Number K of steps on each batch that find the personalized model; the paper's is 5."
    )
    model_learning_rate: PositiveFloat = setting(
        0.05,
        "Learning rate η of the global model: after each batch it moves by the share η λ of the way to the "
        "personalized one; above 1 it overshoots. The paper's 0.005 is for 20 batches a round and hundreds of rounds.",
    )
    server_rate: PositiveFloat = setting(
        1.0,
        "Share β of the way from the model that was sent to the mean of the clients' models; the paper uses 1 and 2.",
    )


METHOD = Method(
    name="pfedme",
    title="personalized models near a common one, which follows them (Moreau envelopes)",
    paper="T. Dinh et al., NeurIPS 2020",
    sends="the client's copy of the global model",
    keeps="nothing",
    uploads=(Upload(part="model", form="values"),),
    learning_rate=0.03,
    client="clients.pfedme:PFedMeClient",
    strategy="strategies.pfedme:PFedMe",
    tasks=ALL_TASKS,
    settings=(PFedMeConfig,),
)
