"""IT-PFL-HN: pFedHN with an encoder that computes a client's embedding from its unlabelled data."""

from typing import ClassVar, Literal

from hyperfl_flwr.core.method import Method, Settings, Upload
from hyperfl_flwr.core.setting_types import Pooling
from hyperfl_flwr.core.settings import NonNegative, Positive, PositiveFloat, Section, setting
from hyperfl_flwr.methods.pfedhn import PFedHNConfig


class ITPFLConfig(Section):
    """Settings of IT-PFL-HN; those of its hypernetwork are in `pfedhn.*`."""

    key: ClassVar[str] = "it-pfl"
    title: ClassVar[str] = "IT-PFL-HN"

    fine_tune_rounds: NonNegative = setting(
        2, "Number of rounds at the end that tune the hypernetwork with a frozen encoder: the second phase."
    )
    encoder_learning_rate: PositiveFloat = setting(
        0.02,
        "Learning rate of the encoder's SGD on the clients; `momentum`, `weight-decay` and `pfedhn.clip-norm` apply "
        "to it, too.",
    )
    encoder_steps: NonNegative = setting(
        1, "Local steps that train the encoder; 0: as many steps, or passes, as for the model."
    )
    encoder_batch_size: Positive = setting(500, "Samples per step of the encoder.")
    encoder_optimiser: Literal["mean", "adam"] = setting(
        "adam",
        "How the server updates the encoder. `adam`: a step of Adam along the clients' mean change (FedAdam, "
        "Reddi et al., ICLR 2021). `mean`: the mean of the clients' encoders, as in the paper.",
    )
    encoder_server_learning_rate: PositiveFloat = setting(5e-4, "Learning rate of the server's Adam.")
    pooling: Pooling = setting(
        "mean",
        "How the vectors of a client's samples are reduced to one. `mean-max`: half of the units are averaged, the "
        "others are maxima. `mean`: the vectors are scaled to length 1 and averaged, which differentially private "
        "noise requires.",
    )

    def fine_tunes(self, server_round: int, num_rounds: int) -> bool:
        """Return whether a round is of the second phase, which tunes the hypernetwork with a frozen encoder.

        Args:
            server_round: Number of the round, from 1.
            num_rounds: Number of rounds of the run.
        """
        return server_round > num_rounds - self.fine_tune_rounds


def _trains_encoder(settings: Settings, server_round: int) -> bool:
    return not settings.section(ITPFLConfig).fine_tunes(server_round, settings.num_rounds)


METHOD = Method(
    name="it-pfl",
    title="pFedHN with an encoder that computes a client's embedding from its unlabelled data",
    paper="IT-PFL, under review at ICLR 2022",
    sends="the change of the generated model, the encoder, and a descriptor of the data",
    keeps="nothing",
    uploads=(
        Upload(part="model", form="decrease", separate_start=True),
        Upload(part="encoder", form="values", is_sent=_trains_encoder),
    ),
    learning_rate=0.03,
    client="clients.it_pfl:ITPFLClient",
    strategy="strategies.it_pfl:ITPFL",
    settings=(ITPFLConfig, PFedHNConfig),
)
