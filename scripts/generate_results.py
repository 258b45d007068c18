"""Write tables and figures of results into the documentation, from records: `make results`.

`experiments/records` has the cells of studies. A page has marks around each table, and a picture holds the hash of its
numbers, so that a test can compare both with the records.
"""

import hashlib
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from experiments.figures.curves import draw  # noqa: E402 - after the path
from experiments.matrix import WHAT_TO_CHOOSE, Matrix  # noqa: E402
from experiments.records import Records, find_records, manifest_of, read_records, restore, stale_cells  # noqa: E402
from experiments.study import Study, load_study  # noqa: E402

Format = Callable[[float], str]

SENT = "bytes_up_per_client_round"
"""Number of summary.json that is 0 if clients send nothing."""


def in_percent(value: float) -> str:
    """Format a share in percent with a digit after the point."""
    return f"{100 * value:.1f}"


def one_digit(value: float) -> str:
    """Format a number with a digit after the point."""
    return f"{value:.1f}"


def two_digits(value: float) -> str:
    """Format a number with two digits after the point."""
    return f"{value:.2f}"


def short(value: float) -> str:
    """Format a number with three digits."""
    return f"{value:.3g}"


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of one column of a study, with a line for each row that has records.

    Attributes:
        records: Name of the file of records.
        column: The study's column.
        numbers: For each heading the number's place and its format. A place is a key of summary.json, with a dot for a
            key inside another one, `settings:KEY`, or `interval:KEY` for a number with its 95 % interval.
        rows: The study's rows that are shown; empty for all.
        paper: Heading of a last number, the paper's; empty for none.
    """

    records: str
    column: str
    numbers: Mapping[str, tuple[str, Format]]
    rows: Sequence[str] = ()
    paper: str = ""

    def lines(self) -> list[str]:
        """Return the table in Markdown, and a line on where its numbers come from."""
        records = read_records(find_records(self.records))
        study = load_study(records.study_manifest.study)
        stale = stale_cells(study, records)
        headings = [*self.numbers, *([self.paper] if self.paper else [])]
        lines = ["| | " + " | ".join(headings) + " |", "|---|" + "---:|" * len(headings)]
        shown = []
        for row in study.rows:
            cells = [place for place in records.cells if place[:2] == (row.name, self.column)]
            if not cells or (self.rows and row.name not in self.rows):
                continue
            mark = " (out of date)" if any(place in stale for place in cells) else ""
            values = [self._value(records, cells, key, text) for key, text in self.numbers.values()]
            if self.paper:
                values.append(f"{found.value:.2f}" if (found := study.paper.get((row.name, self.column))) else "")
            lines.append(f"| {row.label}{mark} | {' | '.join(values)} |")
            shown += cells
        return [*lines, "", _source(self, study, records, shown)]

    def _value(self, records: Records, cells: Sequence[tuple[str, str, int]], key: str, text: Format) -> str:
        if key == "privacy.epsilon" and not any(_number(records, place, SENT) for place in cells):
            return "sends nothing"
        if key.startswith("interval:"):
            return _with_interval(records, cells, key.removeprefix("interval:"), text)
        found = [_number(records, place, key) for place in cells]
        known = [value for value in found if value is not None]
        if not known:
            return "none"
        deviation = f" ± {text(statistics.stdev(known))}" if len(set(known)) > 1 else ""
        return f"{text(statistics.fmean(known))}{deviation}"


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A study's figure, as `hyperfl figure` draws it.

    Attributes:
        records: Name of the file of records.
        kind: The figure's name.
        rows, columns: Those of the study that are shown; empty for all.
    """

    records: str
    kind: str
    rows: Sequence[str] = ()
    columns: Sequence[str] = ()

    def write(self, picture: Path) -> None:
        """Draw the figure and write it with the hash of its records."""
        records = read_records(find_records(self.records))
        study = load_study(records.study_manifest.study)
        rows, columns = (
            chosen or {place[axis] for place in records.cells} for axis, chosen in enumerate((self.rows, self.columns))
        )
        shown = {place: cell for place, cell in records.cells.items() if place[0] in rows and place[1] in columns}
        with tempfile.TemporaryDirectory() as folder:
            restore(study, replace(records, cells=shown), Path(folder))
            (drawn,) = draw(study, records.study_manifest, Path(folder), self.kind)
            picture.write_bytes(drawn.read_bytes())
        picture.with_suffix(".sha256").write_text(self.fingerprint() + "\n")

    def fingerprint(self) -> str:
        """Return the hash of the records that the picture shows some of."""
        return hashlib.sha256(find_records(self.records).read_bytes()).hexdigest()


def _number(records: Records, place: tuple[str, str, int], key: str) -> float | None:
    recorded = records.cells[place]
    if key.startswith("settings:"):
        value: Any = manifest_of(recorded, records)["settings"][key.removeprefix("settings:")]
    else:
        value = recorded["summary"]
        for part in key.split("."):
            value = value.get(part) if value is not None else None
    return None if value is None else float(value)


def _with_interval(records: Records, cells: Sequence[tuple[str, str, int]], key: str, text: Format) -> str:
    """Return a number of the only cell with its interval, such as `0.71 (0.69 to 0.73)`."""
    (place,) = cells
    value, low, high = (_number(records, place, key + end) for end in ("", "_low", "_high"))
    if value is None or low is None or high is None:
        return "none"
    return f"{text(value)} ({text(low)} to {text(high)})"


def _source(table: Table, study: Study, records: Records, cells: Sequence[tuple[str, str, int]]) -> str:
    manifests = [records.cells[place]["manifest"] for place in cells]
    commits = sorted({str(manifest["code"]["commit"])[:7] for manifest in manifests})
    processors = ", ".join(sorted({manifest["hardware"]["processor"] for manifest in manifests}))
    changes = "".join(f" --set {key}={value}" for key, value in records.study_manifest.changes.items())
    command = (
        f"hyperfl study {study.name} --datasets {table.column} --seeds {len({seed for *_, seed in cells})}{changes}"
    )
    return f"`{command}`; commit {', '.join(commits)}; {processors}."


PRIVACY_COST = {
    "z": ("settings:privacy.noise-multiplier", short),
    "ε": ("privacy.epsilon", short),
    "personalized": ("test_accuracy", in_percent),
    "aggregate": ("test_accuracy_aggregate", in_percent),
}

RECORD_PRIVACY = {
    "personalized": ("test_accuracy", in_percent),
    "aggregate": ("test_accuracy_aggregate", in_percent),
    "ε": ("privacy.epsilon", short),
}

RECONSTRUCTION = {
    "PSNR, dB": ("psnr", one_digit),
    "SSIM": ("ssim", two_digits),
    "best control, dB": ("control_psnr", one_digit),
}

OF_UPLOAD = {
    "accuracy, %": ("test_accuracy", in_percent),
    "received model, %": ("test_accuracy_aggregate", in_percent),
    "bias gradient, R²": ("interval:upload_bias_r2", two_digits),
    "regression, R²": ("interval:upload_regression_r2", two_digits),
    "bias gradient, points off": ("upload_bias_error", in_percent),
    "regression, points off": ("upload_regression_error", in_percent),
    "mean share, points off": ("upload_prior_error", in_percent),
    "control, R²": ("interval:upload_permuted_r2", two_digits),
}

OF_SUM = {
    "bias gradient, R²": ("interval:sum_bias_r2", two_digits),
    "regression, R²": ("interval:sum_regression_r2", two_digits),
    "bias gradient, points off": ("sum_bias_error", in_percent),
    "regression, points off": ("sum_regression_error", in_percent),
    "mean share, points off": ("sum_prior_error", in_percent),
    "control, R²": ("interval:sum_permuted_r2", two_digits),
}

SUMMED = (
    "one-step", "fedavg", "fedrep", "hyperfl", "hyperfl-frozen", "fedavg-epsilon-8", "fedavg-client-0.02",
    "fedrep-epsilon-8", "fedavg-client-0.2",
)  # fmt: skip
"""Rows of the study `property` in which the uploads of all clients are summed."""

SHARE_ABOVE = {
    "first upload, bias gradient": ("interval:upload_bias_auc", two_digits),
    "first upload, regression": ("interval:upload_regression_auc", two_digits),
    "all uploads, bias gradient": ("interval:server_bias_auc", two_digits),
    "all uploads, regression": ("interval:server_regression_auc", two_digits),
    "exported model, regression": ("interval:model_regression_auc", two_digits),
}

SECONDS = {"seconds per round": ("seconds_per_round", one_digit)}

TABLES: Mapping[str, Mapping[str, Table | Matrix]] = {
    "privacy/differential-privacy.md": {
        **{
            f"private-table-1-{column}": Table(
                records="private-table-1", column=column, numbers=RECORD_PRIVACY, paper="paper, 200 rounds"
            )
            for column in ("fashion-mnist-20", "cifar10-20")
        },
        "table-4-fashion-mnist": Table(records="table-4", column="fashion-mnist", numbers=SECONDS),
        **{
            f"client-privacy-{column}": Table(records="client-privacy", column=column, numbers=PRIVACY_COST)
            for column in ("n20-r10", "n20-r50", "n100-r10")
        },
        **{
            f"private-table-3-{column}": Table(
                records="private-table-3", column=column, numbers=RECONSTRUCTION, paper="paper"
            )
            for column in ("fashion-mnist", "cifar10")
        },
    },
    "privacy/threat-model.md": {
        "property": Table(
            records="property",
            column="upload",
            numbers={
                "first upload": ("interval:upload_regression_r2", two_digits),
                "all uploads": ("interval:server_regression_r2", two_digits),
                "sums": ("interval:sum_regression_r2", two_digits),
                "exported model": ("interval:model_regression_r2", two_digits),
            },
            rows=("local", "fedavg", "pfedhn", "fedrep", "hyperfl", "hyperfl-frozen"),
        ),
    },
    "privacy/property.md": {
        "property-upload": Table(records="property", column="upload", numbers=OF_UPLOAD),
        "property-sum": Table(records="property", column="upload", numbers=OF_SUM, rows=SUMMED),
        "property-above": Table(records="property", column="upload", numbers=SHARE_ABOVE),
    },
    "privacy/what-to-choose.md": {"what-to-choose": Matrix(records="what-to-choose", shown=WHAT_TO_CHOOSE)},
}
"""Tables by page, below docs/, and by the name in their marks."""

FIGURES: Mapping[str, Figure] = {
    "privacy-cost.png": Figure(records="client-privacy", kind="privacy-cost"),
    "privacy-rounds.png": Figure(
        records="client-privacy",
        kind="personalized_accuracy",
        columns=("n20-r50", "n100-r50"),
        rows=("local", *(f"{method}-{noise}" for method in ("fedrep", "hyperfl-frozen") for noise in (0, 0.015, 0.05))),
    ),
    "accuracy-bytes.png": Figure(records="what-to-choose", kind="accuracy-bytes", columns=("accuracy",)),
    "leakage-accuracy.png": Figure(records="what-to-choose", kind="leakage-accuracy"),
    "property.png": Figure(records="property", kind="property"),
}
"""Figures by picture, below docs/pictures/."""


def page_text(name: str) -> str:
    """Return the text of a page with its tables as the records have them."""
    text = (ROOT / "docs" / name).read_text()
    for mark, table in TABLES[name].items():
        before, begin, rest = text.partition(f"<!-- {mark}: generated by `make results` -->\n")
        _, end, after = rest.partition("\n<!-- end -->")
        if not (begin and end):
            raise ValueError(f"{name} has no marks for the table {mark}")
        text = f"{before}{begin}\n{chr(10).join(table.lines())}\n{end}{after}"
    return text


def main() -> None:
    """Write all tables and figures."""
    for name in TABLES:
        (ROOT / "docs" / name).write_text(page_text(name))
    for name, figure in FIGURES.items():
        figure.write(ROOT / "docs" / "pictures" / name)


if __name__ == "__main__":
    main()
