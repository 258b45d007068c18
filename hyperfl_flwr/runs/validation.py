"""Decide about rounds by mean scores on validation data: when training ends, and which round was the best."""

import math
from collections.abc import Iterable, Mapping

from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.core.tasks import TASKS, Task
from hyperfl_flwr.methods import METHODS
from hyperfl_flwr.runs.checkpoint import Progress
from hyperfl_flwr.runs.run_directory import Record

KINDS = ("aggregate", "personalized")
"""Kinds of models with a mean validation score: as received, and after local training."""


def note_means(progress: Progress, task: Task, means: Mapping[str, float], server_round: int) -> None:
    """Update a run's best rounds.

    Args:
        progress: Progress of the run.
        task: Its task.
        means: Means over the clients of a round, by metric; without scores on validation data, nothing changes.
        server_round: The round after which the clients' models had these values; the received models are those of the
            round before.
    """
    known = {kind: task.merit(means[name]) for kind in KINDS if (name := f"{kind}-validation-{task.deciding}") in means}
    if not known:
        return
    progress.rounds_without_rise += 1
    for kind, mean in known.items():
        number, best = server_round - (kind == "aggregate"), progress.best_validation.get(kind, -math.inf)
        if mean > best:
            progress.last_rise, progress.rounds_without_rise = max(progress.last_rise, number), 0
        if mean >= best:
            progress.best_validation[kind], progress.best_round[kind] = mean, number


def is_over(progress: Progress, patience: int) -> bool:
    """Return whether no mean score on validation data has risen for some rounds, of those in which they are known.

    Args:
        progress: Progress of the run.
        patience: The number of rounds, setting `early-stopping`; with 0 the answer is no.
    """
    return 0 < patience <= progress.rounds_without_rise and not progress.failed_rounds


def over_text(progress: Progress, config: RunConfig) -> str:
    """Return why training is over, in one line."""
    task = TASKS[config.task]
    return (
        f"training ends after round {progress.round} of {progress.num_rounds}: the mean {task.deciding_title} on "
        f"validation data has not {'fallen' if task.decides_by_least else 'risen'} since round {progress.last_rise} "
        f"(early-stopping = {config.early_stopping})"
    )


def chooses_state(settings: Mapping[str, Scalar]) -> bool:
    """Return whether a run keeps the best global state: with `keep = best`, if all clients measure each state.

    Means over clients that are drawn for each round would choose the round with the easiest clients.
    """
    of_all = settings.get("fraction-train") == 1 and settings.get("evaluate", "all") == "all"
    return settings.get("keep") == "best" and of_all and measures_state(settings)


def measures_state(settings: Mapping[str, Scalar]) -> bool:
    """Return whether the accuracy `aggregate` of every round is of the state after it, as with all methods but one.

    Methods of the user's own, and of other versions, count as such: they cannot always be imported where a run is read.
    """
    method = METHODS.built_in.get(str(settings.get("method", "")))
    return method is None or method.measures_state(settings)


def replaces_test_data(settings: Mapping[str, Scalar]) -> bool:
    """Return whether the scores of a run are of validation data: of those that decide about no round."""
    decides = settings.get("early-stopping") or settings.get("keep") == "best"
    return not decides and float(settings.get("data.validation-fraction", 0)) > 0


def best_record(records: Iterable[Record], task: Task, kind: str) -> Record:
    """Return the record of metrics.jsonl of the round in which a kind of model was the best on validation data.

    Args:
        records: Lines of metrics.jsonl.
        task: The run's task.
        kind: One of `KINDS`.

    Returns:
        The last of several; empty if no record has one.
    """
    lines, name = {"aggregate": "aggregate", "personalized": "train"}[kind], f"{kind}_validation_{task.deciding}"
    known = [
        (task.merit(float(record[name])), record) for record in records if record["kind"] == lines and name in record
    ]
    return max(reversed(known), key=lambda found: found[0], default=(0.0, {}))[1]
