"""PRIV-HFL: consensus by dual variables; every client keeps a private model."""

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field, ValidationInfo, field_validator

from hyperfl_flwr.core.method import Method, Settings, Upload
from hyperfl_flwr.core.setting_types import Order, Realisation, Scalar
from hyperfl_flwr.core.settings import Auto, NonNegative, NonNegativeFloat, Positive, PositiveFloat, Section, setting


class PrivHFLConfig(Section):
    """Settings of PRIV-HFL."""

    key: ClassVar[str] = "priv-hfl"
    title: ClassVar[str] = "PRIV-HFL"

    realisation: Realisation = setting(
        "mean",
        "The models that a client is pulled towards. `mean`: the mean of all. `chain`: its neighbours in a chain.",
    )
    order: Order = setting(
        "alternating",
        "The multipliers of a client's steps. `alternating`: those updated with the newest models. `published`: "
        "those of the round before, as in the paper.",
    )
    projection: bool = setting(
        False, "Keep both multipliers of a pair of clients and make them non-negative; with the `chain` only."
    )
    sigma: Auto | NonNegativeFloat = setting(
        "auto",
        "Regulariser of the dual; 0 leads to exact consensus. `auto`: 0.1 / β², with which a multiplier forgets a "
        "tenth in each round.",
    )
    dual_step: Auto | PositiveFloat = setting(
        "auto",
        "Step size β of the dual. `auto`: 1 / (κ l α K), with client sampling a tenth of the sampled share of that.",
    )
    local_steps: Positive = setting(
        20, "Number K of local steps, the same for every client, instead of `local-epochs`."
    )
    clip_norm: NonNegativeFloat = setting(
        10.0,
        "Largest norm of the local loss's gradient in each step, before the dual force is added; 0 does not clip.",
    )
    distill: bool = setting(
        False, "Also train on pseudo-data from a generator that all clients train together; for images only."
    )
    generator_learning_rate: PositiveFloat = setting(
        0.1, "Learning rate of the server's step of the generator along the mean of the clients' gradients."
    )
    generator_width: Positive = setting(64, "Number of the generator's feature maps.")
    pseudo_samples: Annotated[int, Field(ge=2)] = setting(100, "Pseudo-samples that a client generates per round.")
    class_balance: Annotated[float, Field(gt=1, allow_inf_nan=False)] = setting(
        2.0,
        "Constant c: labels of pseudo-data are drawn with probabilities proportional to c max n − n_y, for the "
        "client's n_y samples of class y.",
    )
    keep_generators: NonNegative = setting(
        0,
        "Rounds between copies of the generator that the server writes to the run's folder; 0 writes none.",
    )
    mixing: bool = setting(
        False,
        "Clients rotate the exchanged vectors by a secret of the nodes; every node needs `mixing-key-file` in its "
        "node config. This is obfuscation, not encryption.",
    )

    send_mean: bool = setting(
        False,
        "Also send the mean of the clients' changes in every round, so that `aggregate` is the accuracy of the mean "
        "model in all rounds, not only after the last one. With the `mean` form only; clients receive as many bytes "
        "again.",
    )

    @field_validator("send_mean")
    @classmethod
    def _needs_mean(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("realisation") == "chain":
            raise ValueError("needs priv-hfl.realisation = mean: in the chain the server knows no mean")
        return value

    @field_validator("projection")
    @classmethod
    def _needs_chain(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("realisation") == "mean":
            raise ValueError("needs priv-hfl.realisation = chain: the mean form has no multipliers to project")
        return value


def _measures_mean(settings: Mapping[str, Scalar]) -> bool:
    """Return whether `aggregate` is of the same models in all rounds: the mean model's, or, in the chain, the own."""
    return settings.get("priv-hfl.realisation") == "chain" or bool(settings.get("priv-hfl.send-mean"))


def _distils(settings: Settings, server_round: int) -> bool:
    return settings.section(PrivHFLConfig).distill


METHOD = Method(
    name="priv-hfl",
    title="consensus by dual variables: every client keeps a private model",
    paper="Najafi et al., PRIV-HFL",
    sends="the change of the client's model; with distillation a gradient of the common generator, too",
    keeps="its model and dual variables",
    uploads=(
        Upload(part="kept-model", form="increase", separate_start=True),
        Upload(part="generator", form="gradient", is_sent=_distils),
    ),
    learning_rate=0.05,
    client="clients.priv_hfl:PrivHFLClient",
    strategy="strategies.priv_hfl:PrivHFL",
    settings=(PrivHFLConfig,),
    measures_state=_measures_mean,
)
