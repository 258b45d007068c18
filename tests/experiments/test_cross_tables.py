"""Tables whose lines and columns are any rows, columns, seeds and numbers of a study."""

import re
import statistics
from pathlib import Path

import pytest

from experiments.golden import fingerprints
from experiments.number_formats import in_percent
from experiments.records import find_records, read_records
from hyperfl_flwr import ROOT
from scripts.cross_tables import CrossTable, Part

BOTH = ("test_accuracy", "test_accuracy_aggregate")

pytestmark = pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="needs a checkout of the project")


def table(records: str, **others: Part) -> CrossTable:
    """Return a table of two methods on two data sets."""
    return CrossTable(
        records=records, text=in_percent, corner="data",
        headings={"FedAvg": Part(row="fedavg"), "FedDyn": Part(row="feddyn"), **others},
        shown={
            "Fashion-MNIST": Part(column="fashion-mnist", seed=0, numbers=BOTH),
            "CIFAR-10, seed 1": Part(column="cifar10", seed=1, numbers=BOTH),
            "CIFAR-10": Part(column="cifar10", numbers=BOTH[:1]),
        },
    )  # fmt: skip


def texts(found: CrossTable) -> list[list[str]]:
    """Return the cells of the lines, without the heading."""
    return [[text.strip() for text in line.split("|")[1:-1]] for line in found.lines()[2:] if line.startswith("|")]


def test_lines_and_columns_say_together_which_cell_it_is() -> None:
    """A seed's numbers stand alone; without a seed they are the mean of all, with its deviation."""
    cells = read_records(find_records("personalized")).cells
    of = {place: [f"{100 * cell['summary'][key]:.1f}" for key in BOTH] for place, cell in cells.items()}
    found = table("personalized", MOON=Part(row="moon"))
    lines = texts(found)
    assert found.lines()[:2] == ["| data | FedAvg | FedDyn | MOON |", "|---|---:|---:|---:|"]
    assert [line[0] for line in lines] == ["Fashion-MNIST", "CIFAR-10, seed 1", "CIFAR-10"]
    for place, row in enumerate(("fedavg", "feddyn"), start=1):
        seeds = [100 * cells[key]["summary"]["test_accuracy"] for key in cells if key[:2] == (row, "cifar10")]
        assert len(seeds) > 1
        assert [line[place] for line in lines] == [
            " / ".join(of[row, "fashion-mnist", 0]),
            " / ".join(of[row, "cifar10", 1]),
            f"{statistics.fmean(seeds):.1f} ± {statistics.stdev(seeds):.1f}",
        ]
    source = found.lines()[-1]
    methods, data = "fedavg,feddyn,moon", "fashion-mnist,cifar10"
    assert re.match(rf"`hyperfl study personalized --rows {methods} --columns {data} --seeds \d`; commit ", source)


def test_cells_without_a_record_and_stale_ones_are_marked(tmp_path: Path) -> None:
    """A dash stands for numbers of a cell that has not been run; a line with a stale cell says so."""
    text = find_records("personalized").read_text()
    fewer = [line for line in text.splitlines() if not re.search(r'"row": ?"feddyn".*"seed": ?1', line)]
    assert len(fewer) < len(text.splitlines())
    (tmp_path / "fewer.jsonl").write_text("\n".join(fewer))
    assert texts(table(str(tmp_path / "fewer.jsonl")))[1][2] == "–"
    place = r'"row": ?"fedavg", ?"column": ?"fashion-mnist", ?"seed": ?0'
    (line,) = (line for line in fewer if re.search(place, line))
    of_code = fingerprints({"method": "fedavg"})["fedavg"]
    assert of_code in line
    (tmp_path / "stale.jsonl").write_text(text.replace(line, line.replace(of_code, "0" * 12)))
    labels = [line[0] for line in texts(table(str(tmp_path / "stale.jsonl")))]
    assert labels == ["Fashion-MNIST (out of date)", "CIFAR-10, seed 1", "CIFAR-10"]


def test_a_cell_can_be_a_text_of_its_summary() -> None:
    """The line says what is read; a part that several seeds have is no single cell."""
    cells = read_records(find_records("personalized")).cells
    says = Part(column="fashion-mnist", seed=0, says=lambda summary: f"{summary['num_clients']} clients")
    found = CrossTable(records="personalized", headings={"FedAvg": Part(row="fedavg")}, shown={"data": says})
    number = cells["fedavg", "fashion-mnist", 0]["summary"]["num_clients"]
    assert texts(found) == [["data", f"{number} clients"]]
    every = CrossTable(
        records="personalized", headings={"FedAvg": Part(row="fedavg")},
        shown={"data": Part(column="fashion-mnist", says=says.says)},
    )  # fmt: skip
    with pytest.raises(ValueError, match="too many values"):
        every.lines()


def test_a_name_that_the_study_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match="the study personalized has no row 'feddynn' with a column 'fashion-mnist'"):
        table("personalized", Wrong=Part(row="feddynn")).lines()
