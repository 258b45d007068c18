"""Write the HTML page for a node's owner: accuracy, single classes, what left the node, and the privacy budget."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from markupsafe import Markup

from hyperfl_flwr.core.errors import StateError
from hyperfl_flwr.deploy.ledger_view import RunLedger, ledger_folder, runs_of
from hyperfl_flwr.deploy.node_settings import FILE as NODE_FILE
from hyperfl_flwr.node.data_versions import changed_versions
from hyperfl_flwr.node.evaluations import Evaluation, Evaluations
from hyperfl_flwr.node.ledger import LEDGER
from hyperfl_flwr.node.private_state import client_folders
from hyperfl_flwr.pages.figures import svg
from hyperfl_flwr.pages.render import NOTHING, counted, interval_text, percent, write_page
from hyperfl_flwr.privacy.budget import FILE as PRIVACY_RECORD
from hyperfl_flwr.privacy.budget import read_record
from hyperfl_flwr.privacy.spent import spent
from hyperfl_flwr.runs.plots import Curve, accuracy_figure

DELTA = 1e-5
"""Probability with which the stated privacy bounds may fail."""

MOST_CLASSES = 100
"""Largest number of classes of which the page has a table of predictions."""

KINDS = ("personalized", "aggregate")


@dataclass(frozen=True, kw_only=True)
class ClientPart:
    """The part of the page about one client, as text.

    Attributes:
        number: The client's id.
        cards: Name, value and note of the main numbers.
        curve: Figure of the accuracies over the rounds.
        classes: Rows of class, test samples, recall, and the class that it is most often taken for.
        confusion_headers: Headers of the confusion table.
        confusion: Rows of the confusion table.
        confusion_numbers: Its columns with numbers.
        evaluations: A row for each evaluation.
    """

    number: int
    cards: list[tuple[str, str, str]]
    curve: Markup
    classes: list[tuple[str, str, str, str]]
    confusion_headers: list[str]
    confusion: list[list[str]]
    confusion_numbers: range
    evaluations: list[tuple[str, ...]]

    @classmethod
    def of(cls, found: Evaluations) -> Self:
        """Describe a client's evaluations, of which there is at least one."""
        kind = next(kind for kind in KINDS if found.newest(kind))
        figure = accuracy_figure(*(_curve(found, each) for each in KINDS))
        cells = _Cells(found.confusion[kind])
        shown = cells.classes[:MOST_CLASSES]
        return cls(
            number=found.client,
            cards=_cards(found),
            curve=svg(figure, f"accuracy-{found.client}", "accuracy on this node's test data over the rounds"),
            classes=[_class_row(number, cells, found.classes) for number in cells.true],
            confusion_headers=["true class", *(found.classes[number] for number in shown)],
            confusion=[
                [found.classes[row], *(str(cells.numbers.get((row, column), 0)) for column in shown)] for row in shown
            ],
            confusion_numbers=range(1, len(shown) + 1),
            evaluations=[_evaluation_row(entry) for entry in found.entries],
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

    def __init__(self, cells: Sequence[Sequence[int]]) -> None:
        self.numbers = {(true, predicted): number for true, predicted, number in cells}
        self.true = sorted({true for true, _ in self.numbers})
        self.classes = sorted({number for pair in self.numbers for number in pair})

    def row(self, true: int) -> dict[int, int]:
        """Return the predictions for the samples of a class: predicted class -> number."""
        return {predicted: number for (each, predicted), number in self.numbers.items() if each == true}


def _curve(found: Evaluations, kind: str) -> Curve:
    curve = found.curve(kind)
    return list(curve), list(curve.values())


def _cards(found: Evaluations) -> list[tuple[str, str, str]]:
    cards: list[tuple[str, str, str]] = []
    last = found.entries[-1]
    notes = {"personalized": "after local training in", "aggregate": "global state as received after"}
    for kind in reversed(KINDS):
        if (entry := found.newest(kind)) is not None:
            samples, interval = counted(entry.samples, "test sample"), interval_text(entry.interval)
            note = f"{notes[kind]} round {entry.round}; {samples}, 95 % interval {interval}"
            cards.insert(0, (f"{kind.capitalize()} accuracy", percent(entry.accuracy), note))
            last = entry
    share = "accuracy of a model that always says the most common class"
    cards.append(("Most common class", percent(last.majority_share), share))
    others = f"mean recall of the classes; macro F1 {percent(last.macro_f1)}, AUC {_known(last.auc)}"
    cards.append(("Balanced accuracy", percent(last.balanced_accuracy), others))
    return cards


def _class_row(number: int, cells: _Cells, classes: Sequence[str]) -> tuple[str, str, str, str]:
    row = cells.row(number)
    total, wrong = sum(row.values()), {other: count for other, count in row.items() if other != number}
    most = max(wrong, key=lambda other: wrong[other], default=None)
    mistaken = "none" if most is None else f"{classes[most]} ({wrong[most]})"
    return classes[number], str(total), percent(row.get(number, 0) / total), mistaken


def _evaluation_row(entry: Evaluation) -> tuple[str, ...]:
    shares = (entry.accuracy, entry.balanced_accuracy, entry.macro_f1, entry.auc)
    return str(entry.round), entry.kind, *map(_known, shares), f"{entry.loss:.4f}"


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
