"""Write the HTML page for a node's owner: accuracy, single classes, what left the node, and the privacy budget."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from markupsafe import Markup

from hyperfl_flwr.core.errors import StateError
from hyperfl_flwr.core.plurals import counted
from hyperfl_flwr.core.tasks import CLASSIFICATION, MULTI_LABEL, NO_CLASS, REGRESSION, TASKS, Task, class_name
from hyperfl_flwr.deploy.ledger_view import RunLedger, ledger_folder, runs_of
from hyperfl_flwr.deploy.node_settings import FILE as NODE_FILE
from hyperfl_flwr.node.data_versions import changed_versions
from hyperfl_flwr.node.evaluations import Evaluation, Evaluations
from hyperfl_flwr.node.ledger import LEDGER
from hyperfl_flwr.node.private_state import client_folders
from hyperfl_flwr.pages.figures import svg
from hyperfl_flwr.pages.render import NOTHING, percent, score_interval_text, write_page
from hyperfl_flwr.privacy.budget import FILE as PRIVACY_RECORD
from hyperfl_flwr.privacy.budget import read_record
from hyperfl_flwr.privacy.spent import spent
from hyperfl_flwr.runs.figures.panels import Curve
from hyperfl_flwr.runs.figures.plots import score_figure

DELTA = 1e-5
"""Probability with which the stated privacy bounds may fail."""

MOST_CLASSES = 100
"""Largest number of classes of which the page has a table of predictions."""

KINDS = ("personalized", "aggregate")

OUTPUT_HEADERS = {
    CLASSIFICATION.name: ["class", "test samples", "recall", "most often taken for"],
    MULTI_LABEL.name: ["label", "test samples with it", "sensitivity", "specificity", "AUC"],
    REGRESSION.name: ["target", "R²", "root mean square error", "mean absolute error"],
}
"""Headers of the table of single classes, labels or targets, by task; errors are in the units of the targets."""


@dataclass(frozen=True, kw_only=True)
class ClientPart:
    """The part of the page about one client, as text.

    Attributes:
        number: The client's id.
        cards: Name, value and note of the main numbers.
        curve: Figure of the main scores over the rounds.
        kind: The kind of model, of `KINDS`, that `outputs` and `confusion` are of.
        outputs_headers: Headers of `outputs`.
        outputs: Rows of single classes (test samples, recall, and the class that it is most often taken for), labels or
            targets.
        confusion_headers: Headers of the confusion table of classes; empty for another task.
        confusion: Rows of the confusion table.
        confusion_numbers: Its columns with numbers.
        evaluations_headers: Headers of `evaluations`.
        evaluations: A row for each evaluation.
        task: What the client's models predict.
    """

    number: int
    cards: list[tuple[str, str, str]]
    curve: Markup
    kind: str
    outputs_headers: list[str]
    outputs: list[tuple[str, ...]]
    confusion_headers: list[str]
    confusion: list[list[str]]
    confusion_numbers: range
    evaluations_headers: list[str]
    evaluations: list[tuple[str, ...]]
    task: Task

    @classmethod
    def of(cls, found: Evaluations) -> Self:
        """Describe a client's evaluations, of which there is at least one."""
        kind = next(kind for kind in KINDS if found.newest(kind))
        task = TASKS[found.task]
        figure = score_figure(_curve(found, "personalized"), _curve(found, "aggregate"), task)
        cells = _Cells(found.confusion[kind] if task is CLASSIFICATION else [])
        shown = cells.classes[:MOST_CLASSES]
        names = [title.partition(" (")[0] for title in task.score_titles]
        return cls(
            number=found.client,
            cards=_cards(found),
            curve=svg(
                figure, f"{task.score}-{found.client}", f"{task.score_title} on this node's test data over the rounds"
            ),
            kind=kind,
            outputs_headers=OUTPUT_HEADERS[task.name],
            outputs=[_class_row(number, cells, found.classes) for number in cells.true]
            if task is CLASSIFICATION
            else [_output_row(*named, task) for named in zip(found.classes, found.confusion[kind], strict=True)],
            confusion_headers=["true class", *(found.classes[number] for number in shown)],
            confusion=[
                [found.classes[row], *(str(cells.numbers.get((row, column), 0)) for column in shown)] for row in shown
            ],
            confusion_numbers=range(1, len(shown) + 1),
            evaluations_headers=["after round", "model", task.score_title, *names, "loss"],
            evaluations=[_evaluation_row(entry, task) for entry in found.entries],
            task=task,
        )


def is_node(folder: Path) -> bool:
    """Return whether a folder is a node's: its state-dir, or one with its `node.toml`."""
    return not (folder / "manifest.json").is_file() and any((folder / name).is_file() for name in (LEDGER, NODE_FILE))


def write_owner_page(folder: Path, experiment: str | None = None, output: Path | None = None) -> Path:
    """Write the page of a node's run, readable by its owner only.

    Args:
        folder: The node's state-dir, or the folder that contains it or its `node.toml`.
        experiment: Identity of the run, or its first digits; None for the run that was evaluated last.
        output: File to write; None for `report.html` in the node's folder of the run.

    Returns:
        The file.

    Raises:
        StateError: If the node has evaluated no such run, or one of its files is damaged.
    """
    states = ledger_folder(folder)
    run, clients = _evaluated(states, experiment)
    ledger, _ = runs_of(states)
    of_run = next((one for one in ledger if one.experiment == clients[0].experiment), RunLedger(experiment=""))
    record = states / PRIVACY_RECORD
    file = output or run / "report.html"
    write_page(
        file,
        "owner.html",
        mode=0o600,
        run=clients[0],
        clients=[ClientPart.of(each) for each in clients],
        leaked=of_run.leaked,
        private=of_run.private,
        sent_models=of_run.sent_models,
        versions=[
            (each.since, each.title, str(each.train), str(each.test), each.sha256[:8])
            for each in changed_versions(states)
        ],
        knows_private=of_run.knows_private,
        sent=sum(entry.bytes for entry in of_run.entries if entry.direction == "out"),
        messages=sum(entry.direction == "out" for entry in of_run.entries),
        totals=[(name, f"{left:,}", f"{came:,}") for name, (left, came) in of_run.totals().items()],
        spent=_spent_rows(record, clients[0].experiment) if record.is_file() else [],
        delta=f"{DELTA:g}",
    )
    return file


def _evaluated(states: Path, experiment: str | None) -> tuple[Path, list[Evaluations]]:
    """Return a node's folder of a run, and the evaluations of its clients."""
    runs: dict[Path, list[Path]] = {}
    for folder in sorted(states.glob("*/")):
        if found := [client for client in client_folders(folder) if Evaluations.stored(client)]:
            runs[folder] = found
    names = {folder.name: folder for folder in runs}
    if experiment is not None:
        names = {name: folder for name, folder in names.items() if experiment and name.startswith(experiment)}
    if not names:
        known = ", ".join(folder.name for folder in runs) or "none"
        which = f"the run {experiment!r}" if experiment is not None else "a run"
        raise StateError(f"{states} has no evaluations of {which}; it has those of {known}")
    newest = max(names.values(), key=lambda folder: max(Evaluations.stored(client) for client in runs[folder]))
    return newest, [evaluations for client in runs[newest] if (evaluations := Evaluations.read(client))]


class _Cells:
    """The confusion of an evaluation.

    Attributes:
        numbers: Number of samples by true and predicted class.
        true: Classes that have samples, ascending.
        classes: Classes that have samples or predictions, ascending.
    """

    def __init__(self, cells: Sequence[Sequence[float]]) -> None:
        self.numbers = {(int(true), int(predicted)): int(number) for true, predicted, number in cells}
        self.true = sorted({true for true, _ in self.numbers})
        self.classes = sorted({number for pair in self.numbers for number in pair} - {NO_CLASS})

    def row(self, true: int) -> dict[int, int]:
        """Return the predictions for the samples of a class: predicted class -> number."""
        return {predicted: number for (each, predicted), number in self.numbers.items() if each == true}


def _curve(found: Evaluations, kind: str) -> Curve:
    curve = found.curve(kind)
    return list(curve), list(curve.values())


def _cards(found: Evaluations) -> list[tuple[str, str, str]]:
    cards: list[tuple[str, str, str]] = []
    task = TASKS[found.task]
    last = found.entries[-1]
    notes = {"personalized": "after local training in", "aggregate": "global state as received after"}
    for kind in reversed(KINDS):
        if (entry := found.newest(kind)) is not None:
            note = f"{notes[kind]} round {entry.round}; {counted(entry.samples, 'test sample')}"
            if entry.interval is not None:
                note += f", 95 % interval {score_interval_text(entry.interval, task)}"
            cards.insert(0, (f"{kind.capitalize()} {task.score_title}", task.text(entry.score), note))
            last = entry
    if task is REGRESSION:
        unit = "mean over the targets, in the unit of data.target-scale"
        cards.append(("Root mean square error", task.text(last.scores["rmse"]), unit))
        return cards
    known = {name: _known(value) for name, value in last.scores.items()}
    usual = "class" if task is CLASSIFICATION else "values"
    share = f"accuracy of a model that always says the most common {usual}"
    cards.append((f"Most common {usual}", known["majority_share"], share))
    mean = "recall of the classes" if task is CLASSIFICATION else "of sensitivity and specificity"
    others = f"mean {mean}; macro F1 {known['macro_f1']}, AUC {known['auc']}"
    cards.append(("Balanced accuracy", known["balanced_accuracy"], others))
    return cards


def _output_row(name: str, numbers: Sequence[float], task: Task) -> tuple[str, ...]:
    """Return the row of a label or a target."""
    if task is REGRESSION:
        return name, *(f"{value:.4g}" if math.isfinite(value) else NOTHING for value in numbers)
    samples, *shares = numbers
    return name, f"{samples:.0f}", *map(_known, shares)


def _class_row(number: int, cells: _Cells, classes: Sequence[str]) -> tuple[str, ...]:
    row = cells.row(number)
    total, wrong = sum(row.values()), {other: count for other, count in row.items() if other != number}
    most = max(wrong, key=lambda other: wrong[other], default=None)
    mistaken = "none" if most is None else f"{class_name(most, classes)} ({wrong[most]})"
    return classes[number], str(total), percent(row.get(number, 0) / total), mistaken


def _evaluation_row(entry: Evaluation, task: Task) -> tuple[str, ...]:
    scores = (entry.score, *(entry.scores[name] for name in task.all_scores))
    shown = (task.text(value) if value == value else NOTHING for value in scores)
    return str(entry.round), entry.kind, *shown, f"{entry.loss:.4f}"


def _known(share: float) -> str:
    """Return a share in percent; a dash for NaN."""
    return percent(share) if share == share else NOTHING


def _spent_rows(record: Path, experiment: str) -> list[tuple[str, ...]]:
    """Return a row for each client whose uploads are bounded."""
    return [
        (str(row.client), str(row.releases), f"{row.record_epsilon:.4g}", f"{row.client_epsilon:.4g}")
        for row in spent(read_record(record), DELTA)
        if row.experiment == experiment and math.isfinite(min(row.record_epsilon, row.client_epsilon))
    ]
