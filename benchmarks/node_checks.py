"""Measure the checks of a node's owner: honest runs of all methods, forged networks, and time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.forged_networks import FORGERIES, GENERATING, OF_GENERATED
from benchmarks.markdown import table
from benchmarks.measure import Note
from benchmarks.measure_node_checks import LIMITS, forged, honest, seconds
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.privacy.received_network import STATISTICS, Measured, Statistic

Values = Mapping[Statistic, float]
"""The largest value of each statistic that was measured."""

FEW_CLASSES: Mapping[str, Scalar] = {
    "data.partition": "shards", "fraction-train": 0.4, "num-clients": 10, "data.train-samples": 60,
}  # fmt: skip
"""Settings of the second runs: ten clients with few classes and samples, of which four take part in a round."""

FEW_METHODS = ("fedavg", "fedrep", "hyperfl", "pfedhn")

TIMED = {"`cnn`, 28x28": ("cnn", (1, 28, 28), 11), "ResNet-18, 32x32": ("resnet18", (3, 32, 32), 3)}
"""Networks whose checks are timed: target, shape of an image, number of measurements."""


@dataclass(frozen=True, kw_only=True)
class CheckedNetworks:
    """What the checks measure.

    Attributes:
        honest: By method, in honest runs.
        few_classes: The same in runs with `FEW_CLASSES`.
        forged: By name, of forged networks.
        seconds: CPU seconds of the checks of a network with 200 samples, the median, by its name.
    """

    honest: Mapping[str, Values]
    few_classes: Mapping[str, Values]
    forged: Mapping[str, Values]
    seconds: Mapping[str, float]


def measure_checks(methods: Sequence[str], note: Note = print) -> CheckedNetworks:
    """Measure honest runs of methods, forged networks, and time.

    Args:
        methods: Methods of the honest runs.
        note: Receives a line for each run.
    """
    found: dict[str, dict[str, Values]] = {"honest": {}, "few classes": {}}
    for name, chosen, changes in (
        ("honest", methods, {}),
        ("few classes", [method for method in FEW_METHODS if method in methods], FEW_CLASSES),
    ):
        for method in chosen:
            note(f"node checks, {name}: {method}")
            found[name][method] = honest(method, changes)
    networks = {name: _values(forged(forgery)) for name, forgery in FORGERIES.items()}
    networks |= {name: _values(forged(forgery, GENERATING)) for name, forgery in OF_GENERATED.items()}
    times = {name: seconds(*arguments) for name, arguments in TIMED.items()}
    return CheckedNetworks(honest=found["honest"], few_classes=found["few classes"], forged=networks, seconds=times)


def _values(measured: Sequence[Measured]) -> Values:
    return {each.statistic: each.value for each in measured}


def check_tables(found: CheckedNetworks) -> list[str]:
    """Return the tables of honest runs, of those with few classes, of forged networks, and of the time."""
    return [
        _table("method", {f"`{method}`": values for method, values in found.honest.items()}),
        _table("method", {f"`{method}`": values for method, values in found.few_classes.items()}),
        _table("network", found.forged),
        table(["network", "CPU ms"], [(name, f"{1000 * value:,.0f}") for name, value in found.seconds.items()]),
    ]


def _table(corner: str, rows: Mapping[str, Values]) -> str:
    """Return a table; values above the default limits are bold, and what was not measured is empty."""
    return table(
        [corner, *STATISTICS], [(name, *(_text(values, each) for each in STATISTICS)) for name, values in rows.items()]
    )


def _text(values: Values, statistic: Statistic) -> str:
    if statistic not in values:
        return ""
    shown = f"{values[statistic]:z.2f}"
    return f"**{shown}**" if values[statistic] > LIMITS[statistic] else shown
