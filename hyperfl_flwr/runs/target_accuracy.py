"""Rounds that a run needs to reach accuracies: its targets, the numbers of summary.json, and their texts."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.core.tasks import Task, task_of
from hyperfl_flwr.runs.run_directory import Record
from hyperfl_flwr.runs.validation import measures_state

_PERSONALIZED = {"rounds_to_target": "personalized"}

_LABELS = {**_PERSONALIZED, "rounds_to_target_aggregate": "aggregate"}

PLAIN = tuple(_LABELS)
"""Names of the numbers of rounds to the highest target."""

_NAME = re.compile(r"rounds_to_target(_[\d.e-]+)?(_aggregate)?")


def counts_rounds(name: str) -> bool:
    """Return whether a number of summary.json is a number of rounds to a target, None if the run did not reach it."""
    return bool(_NAME.fullmatch(name))


def targets_of(settings: Mapping[str, Scalar]) -> list[float]:
    """Return the values of the setting `target-accuracy`, the highest last; manifests of earlier versions lack it."""
    given = str(settings.get("target-accuracy", 0.0))
    return sorted(target for text in given.split(",") if (target := float(text)))


def rounds_to_targets(settings: Mapping[str, Scalar], records: Sequence[Record], task: Task) -> dict[str, int | None]:
    """Return the first rounds with a mean accuracy of at least the targets, for summary.json.

    Args:
        settings: The run's settings.
        records: The lines of metrics.jsonl.
        task: The run's task.

    Returns:
        For each target the rounds of the personalized accuracy, for example `rounds_to_target_0.46`, and of the
        aggregate one, `rounds_to_target_0.46_aggregate`; and those of the highest target without its number in their
        names. None if the run did not reach the target, or has none, and of aggregate accuracies if they are not of the
        state of every round (`measures_state`). An aggregate accuracy has the round of the state that it is of,
        although clients measure it one round later.
    """
    targets = targets_of(settings)
    curves = {
        "": ("train", f"personalized_{task.score}"),
        "_aggregate": ("aggregate" if measures_state(settings) else "", f"aggregate_{task.score}"),
    }
    highest = targets[-1] if targets else math.inf
    numbered = {f"_{target}": target for target in targets}
    return {
        f"rounds_to_target{name}{part}": _first_round(records, *curve, target)
        for name, target in {"": highest, **numbered}.items()
        for part, curve in curves.items()
    }


def _first_round(records: Sequence[Record], kind: str, name: str, target: float) -> int | None:
    found = (record["round"] for record in records if record["kind"] == kind and record.get(name, -math.inf) >= target)
    return min(found, default=None)


def reached(settings: Mapping[str, Scalar], summary: Mapping[str, Any]) -> Iterator[tuple[str, str, int | None]]:
    """Yield for each target and kind of accuracy its name, the target as shown to people, and the round, or None.

    An aggregate accuracy that is not of the state of every round is left out.

    Args:
        settings: The run's settings.
        summary: The content of summary.json.
    """
    task, labels = task_of(summary), _LABELS if measures_state(settings) else _PERSONALIZED
    for target in targets_of(settings):
        shown = f"{100 * target:g} %" if task.has_shares else f"{target:g}"
        for key, label in labels.items():
            yield f"{label} {task.score_title}", shown, summary[key.replace("target", f"target_{target}")]


def target_text(settings: Mapping[str, Scalar], summary: Mapping[str, Any]) -> str:
    """Describe when a run reached its targets, in one line; empty without a target."""
    return "; ".join(
        f"{accuracy} reached {target} in {'no round' if number is None else f'round {number}'}"
        for accuracy, target, number in reached(settings, summary)
    )
