"""Decide about rounds by mean accuracies on validation data: when training ends, and which round was the best."""

from collections.abc import Iterable, Mapping

from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.runs.checkpoint import Progress
from hyperfl_flwr.runs.run_directory import Record

KINDS = ("aggregate", "personalized")
"""Kinds of models with a mean validation accuracy: as received, and after local training."""


def note_means(progress: Progress, means: Mapping[str, float], server_round: int) -> None:
    """Update a run's best rounds.

    Args:
        progress: Progress of the run.
        means: Means over the clients of a round, by metric; without validation accuracies, nothing changes.
        server_round: The round after which the clients' models had these values; the received models are those of the
            round before.
    """
    known = {kind: means[name] for kind in KINDS if (name := f"{kind}-validation-accuracy") in means}
    if not known:
        return
    progress.rounds_without_rise += 1
    for kind, mean in known.items():
        number, best = server_round - (kind == "aggregate"), progress.best_validation.get(kind, -1.0)
        if mean > best:
            progress.last_rise, progress.rounds_without_rise = max(progress.last_rise, number), 0
        if mean >= best:
            progress.best_validation[kind], progress.best_round[kind] = mean, number


def is_over(progress: Progress, patience: int) -> bool:
    """Return whether no mean validation accuracy has risen for some rounds, of those in which they are known.

    Args:
        progress: Progress of the run.
        patience: The number of rounds, setting `early-stopping`; with 0 the answer is no.
    """
    return 0 < patience <= progress.rounds_without_rise and not progress.failed_rounds


def over_text(progress: Progress, patience: int) -> str:
    """Return why training is over, in one line."""
    return (
        f"training ends after round {progress.round} of {progress.num_rounds}: the mean accuracy on validation data "
        f"has not risen since round {progress.last_rise} (early-stopping = {patience})"
    )


def chooses_state(settings: Mapping[str, Scalar]) -> bool:
    """Return whether a run keeps the best global state: with `keep = best`, if all clients measure each state.

    Means over clients that are drawn for each round would choose the round with the easiest clients.
    """
    of_all = settings.get("fraction-train") == 1 and settings.get("evaluate", "all") == "all"
    return settings.get("keep") == "best" and of_all


def best_record(records: Iterable[Record], kind: str) -> Record:
    """Return the record of metrics.jsonl with the highest mean validation accuracy of a kind of model.

    Args:
        records: Lines of metrics.jsonl.
        kind: One of `KINDS`.

    Returns:
        The last of several; empty if no record has one.
    """
    lines, name = {"aggregate": "aggregate", "personalized": "train"}[kind], f"{kind}_validation_accuracy"
    known = [record for record in records if record["kind"] == lines and name in record]
    return max(reversed(known), key=lambda record: float(record[name]), default={})
