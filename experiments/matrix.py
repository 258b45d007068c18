"""Show many columns of a study in one Markdown table: a line for each row, with words and numbers of its records.

A cell names the strongest of the attacks that it stands for, its control in brackets, and a verdict in words. Pairs of
row and column that cannot exist have a letter, which the list below the table explains; others without a record are
shown as not run.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from experiments.collect import FAILED
from experiments.number_formats import short_version
from experiments.records import Records, find_records, read_records, stale_cells
from experiments.study import Study, load_study
from experiments.study_axes import Line
from hyperfl_flwr.audit.membership.results import BARELY, CONTROLS
from hyperfl_flwr.core.packages.code_version import code_versions
from hyperfl_flwr.runs.failures import has_diverged

Summaries = Mapping[str, Mapping[str, Any]]
"""summary.json of a row's runs, by the names of the study's columns."""

NOT_RUN = "not run"

GUESSING = 0.5
"""Area below the ROC curve of an attacker who guesses."""

VERDICTS = {1.0: "**recovered**", 0.5: "**some**", 0.0: "nothing"}
"""Verdicts of reconstructions, by the number `recovered` of summary.json."""


@dataclass(frozen=True, kw_only=True)
class Shown:
    """A column of the table.

    Attributes:
        columns: Columns of the study whose runs it shows.
        text: Returns the text of a cell from the summaries of its runs.
    """

    columns: Sequence[str]
    text: Callable[[Summaries], str]


def accuracies(found: Summaries) -> str:
    """Return the accuracy of the clients' models, and after a slash that of the model as received, in %."""
    (summary,) = found.values()
    return f"{100 * summary['test_accuracy']:.1f} / {100 * summary['test_accuracy_aggregate']:.1f}"


def epsilon(found: Summaries) -> str:
    """Return the ε that the run has proved, and its unit."""
    (summary,) = found.values()
    known = summary["privacy"]
    if not summary["bytes_up_per_client_round"]:
        return "sends nothing"
    return f"{known['epsilon']:.3g}, {known['unit']}s" if known and known["epsilon"] is not None else "none"


def images(found: Summaries) -> str:
    """Return verdict, images recovered, mean PSNR, the better control's and the name of the strongest attack."""
    (summary,) = found.values()
    return (
        f"{VERDICTS[summary['recovered']]}: {summary['images_recovered']} of {summary['images']}; "
        f"{summary['psnr']:.1f} dB [{summary['control_psnr']:.1f}], `{summary['strongest']}`"
    )


def strongest_membership(summary: Mapping[str, Any], view: str) -> str:
    """Return the name of the membership attack whose interval begins highest: of a wide one nothing follows."""
    return max(("lira", "loss"), key=lambda name: float(summary[f"{view}_{name}_auc_low"]))


def members(view: str) -> Callable[[Summaries], str]:
    """Return a function for the verdict, the strongest attack's area below the ROC curve, and the control's."""

    def text(found: Summaries) -> str:
        (summary,) = found.values()
        best = strongest_membership(summary, view)
        area, low, high = (summary[f"{view}_{best}_auc{end}"] for end in ("", "_low", "_high"))
        verdict = "not recognised" if low <= GUESSING else "barely" if area < BARELY else "**recognised**"
        control = control_area(summary, view, best)
        return f"{verdict}: {area:.3f} ({low:.3f} to {high:.3f}) [{control:.3f}], {best}"

    return text


def control_area(summary: Mapping[str, Any], view: str, attack: str) -> float:
    """Return the area of an attack's control; of the likelihood ratio's in records from before the loss had its own."""
    return float(summary.get(f"{view}_{CONTROLS[attack]}_auc", summary[f"{view}_{CONTROLS['lira']}_auc"]))


def under_attack(found: Summaries) -> str:
    """Return the accuracies of honest clients under each attack, the worse first."""
    worst_first = sorted(found.items(), key=lambda item: item[1]["test_accuracy"])
    return "; ".join(f"{accuracies({name: summary})}, {name.removesuffix('-krum')}" for name, summary in worst_first)


WHAT_TO_CHOOSE: Mapping[str, Shown] = {
    "accuracy, %": Shown(columns=["accuracy"], text=accuracies),
    "ε": Shown(columns=["accuracy"], text=epsilon),
    "curious server: an image": Shown(columns=["image"], text=images),
    "curious server: a round": Shown(columns=["round"], text=images),
    "malicious server: a round": Shown(columns=["malicious-server"], text=images),
    "curious server: members": Shown(columns=["membership-server"], text=members("server")),
    "curious client: members": Shown(columns=["membership-client"], text=members("client")),
    "holder of the model: members": Shown(columns=["membership"], text=members("model")),
    "2 of 10 malicious: accuracy, %": Shown(columns=["sign-flip", "alie"], text=under_attack),
    "the same, Multi-Krum": Shown(columns=["sign-flip-krum", "alie-krum"], text=under_attack),
}
"""The columns of the table of docs/privacy/what-to-choose.md."""


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """A table of several columns of a study.

    Attributes:
        records: Name of the file of records.
        shown: The columns by their headings.
    """

    records: str
    shown: Mapping[str, Shown]

    def lines(self) -> list[str]:
        """Return the table in Markdown, the list of reasons, and a line on where its numbers come from."""
        records = read_records(find_records(self.records))
        study = load_study(records.study_manifest.study)
        stale = stale_cells(study, records)
        reasons: dict[str, str] = {}
        lines = [f"| | {' | '.join(self.shown)} |", "|---|" + "---|" * len(self.shown)]
        for row in study.rows:
            cells = [self._cell(shown, row, study, records, reasons) for shown in self.shown.values()]
            mark = " (out of date)" if any(place[0] == row.name for place in stale) else ""
            lines.append(f"| {row.label}{mark} | {' | '.join(cells)} |")
        letters = [f"- ({letter}) {reason}" for reason, letter in reasons.items()]
        return [*lines, "", *letters, "", _source(study, records)]

    def _cell(self, shown: Shown, row: Line, study: Study, records: Records, reasons: dict[str, str]) -> str:
        columns = {column.name: column for column in study.columns}
        runs = [columns[name] for name in shown.columns]
        if missing := next(filter(None, (row.why_missing(column) for column in runs)), ""):
            return _letter(missing, reasons)
        cells = {column.name: records.cells.get((row.name, column.run, 0)) for column in runs}
        found = {name: cell for name, cell in cells.items() if cell}
        if len(found) < len(runs):
            return NOT_RUN
        if any(has_diverged(cell["manifest"]) for cell in found.values()):
            return FAILED
        return shown.text({name: cell["summary"] for name, cell in found.items()})


def _letter(reason: str, reasons: dict[str, str]) -> str:
    return f"– ({reasons.setdefault(reason, chr(ord('a') + len(reasons)))})"


def seconds_of(cell: Mapping[str, Any]) -> float:
    """Return the time that a recorded cell took; of a resumed run, that of its rounds, without the time in between."""
    manifest, summary = cell["manifest"], cell["summary"]
    if manifest.get("resumed") and "seconds_per_round" in summary:
        return float(summary["seconds_per_round"] * summary["rounds"])
    start, end = (datetime.fromisoformat(manifest[name]) for name in ("start", "end"))
    return (end - start).total_seconds()


def _source(study: Study, records: Records) -> str:
    manifests = [recorded["manifest"] for recorded in records.cells.values()]
    seconds = sum(map(seconds_of, records.cells.values()))
    commits = sorted({short_version(version) for each in manifests for version in code_versions(each)})
    processors = sorted({each["hardware"]["processor"] for each in manifests})
    return (
        f"`hyperfl study {study.name}`; {len(manifests)} of {len(study.cells())} runs, {seconds / 60:.0f} minutes in "
        f"all; commit {', '.join(commits)}; {', '.join(processors)}."
    )
