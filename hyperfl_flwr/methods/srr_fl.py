"""SRR-FL: federated averaging of models of which the clients randomise each weight."""

from typing import Annotated, ClassVar

from pydantic import Field, ValidationInfo, field_validator

from hyperfl_flwr.core.method import Method, Settings, Upload
from hyperfl_flwr.core.settings import NonNegative, PositiveFloat, Section, setting
from hyperfl_flwr.core.tasks import ALL_TASKS

MOST_POINTS = 2**20
"""Largest number of points of a grid."""


class SRRFLConfig(Section):
    """Staircase randomised response of each weight that a client sends."""

    key: ClassVar[str] = "srr-fl"
    title: ClassVar[str] = "SRR-FL"

    epsilon: Annotated[float, Field(gt=0, le=20)] = setting(
        5.0,
        "ε of local differential privacy of ONE weight in one round. All weights of an upload together have ε times "
        "their number, and every round of a client adds as much.",
    )
    radius: PositiveFloat = setting(
        0.075, "Distance r of the ends of the grid from its centre: larger weights are cut to the grid's ends."
    )
    centre: Annotated[float, Field(allow_inf_nan=False)] = setting(0.0, "Centre c of the grid.", values="number")
    precision: Annotated[int, Field(ge=0, le=12)] = setting(
        4, "Number p of decimal places of the grid, which has 2 r 10^p + 1 points."
    )
    groups: Annotated[int, Field(ge=2)] = setting(
        10, "Number m of groups of points, by their distance from the weight; those of a group are equally likely."
    )
    growth: NonNegative = setting(0, "Number of points by which each group is larger than the nearer one.")

    @field_validator("growth")
    @classmethod
    def _fits_the_grid(cls, value: int, info: ValidationInfo) -> int:
        if not {"radius", "precision", "groups"} <= info.data.keys():
            return value
        points, groups = 2 * round(info.data["radius"] * 10 ** info.data["precision"]) + 1, info.data["groups"]
        if not 3 <= points <= MOST_POINTS:
            raise ValueError(
                f"needs a grid of 3 to {MOST_POINTS} points, which is 2 srr-fl.radius 10^srr-fl.precision + 1; got "
                f"{points}"
            )
        if points / groups - (groups - 1) * value / 2 < 1:
            raise ValueError(
                f"is too large: {groups} groups (srr-fl.groups), each {value} points larger than the one before, do "
                f"not fit {points} points"
            )
        return value


def _weight_epsilon(settings: Settings) -> float:
    return settings.section(SRRFLConfig).epsilon


METHOD = Method(
    name="srr-fl",
    title="federated averaging; clients randomise each weight",
    paper="Varun et al., CODASPY 2024",
    sends="the whole model, each weight randomised",
    keeps="nothing",
    uploads=(Upload(part="model", form="values"),),
    learning_rate=0.1,
    client="clients.srr_fl:SRRFLClient",
    strategy="strategies.srr_fl:SRRFL",
    tasks=ALL_TASKS,
    settings=(SRRFLConfig,),
    weight_epsilon=_weight_epsilon,
)
