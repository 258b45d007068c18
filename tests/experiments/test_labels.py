"""Labels of users in tables and figures, which may have characters with a meaning in LaTeX or Matplotlib."""

from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from experiments.collect import collect
from experiments.figures.curves import draw
from experiments.records import find_records, read_records, restore
from experiments.study import load_study
from experiments.tables import latex


def test_latex_prints_labels_as_they_are(tmp_path: Path) -> None:
    study, records = load_study("table-1"), read_records(find_records("table-1"))
    restore(study, records, tmp_path, with_stale=True)
    rows = [replace(row, label=r"npz:~/a^b\c_d {5 %}") for row in study.rows]
    text = latex(collect(replace(study, rows=rows), records.study_manifest, tmp_path, mix=True))
    escaped = r"npz:\textasciitilde{}/a\textasciicircum{}b\textbackslash{}c\_d \{5 \%\}"
    assert sum(line.startswith(f"{escaped} & ") for line in text.splitlines()) > 5


def test_figures_show_labels_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two dollar signs would make a formula, and a label that begins with an underscore would not be in the legend."""
    study, records = load_study("table-1"), read_records(find_records("table-1"))
    restore(study, records, tmp_path, with_stale=True)
    rows = [replace(row, label=f"_{row.label} $^$") for row in study.rows]
    columns = [replace(column, label=f"{column.label} $_$") for column in study.columns]
    shown: list[str] = []
    save = Figure.savefig

    def keep(figure: Figure, *others: object, **named: object) -> None:
        save(figure, *others, **named)  # type: ignore[arg-type]
        legend, title = figure.legends[0].get_texts(), figure.get_suptitle()
        shown.extend([*(text.get_text() for text in legend), *(panel.get_title() for panel in figure.axes), title])

    monkeypatch.setattr(Figure, "savefig", keep)
    named = replace(study, title="Costs $_$", rows=rows, columns=columns)
    draw(named, records.study_manifest, tmp_path, "personalized_accuracy", mix=True)
    plain = {text.replace(r"\$", "$").strip() for text in shown}
    assert "Costs $_$" in plain
    assert {text for text in plain if text.startswith("_")} == {
        row.label for row in rows if any(place[0] == row.name for place in records.cells)
    }
    assert {text for text in plain if text.endswith("$_$")} > {"Costs $_$"}
