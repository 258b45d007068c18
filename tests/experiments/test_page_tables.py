"""Tables and pictures of the documentation, which are made from records."""

import hashlib
import importlib.util
import json
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from matplotlib.axes import Axes

from experiments.figures.curves import draw
from experiments.golden import fingerprints
from experiments.number_formats import in_percent, one_digit, two_digits
from experiments.recording import record
from experiments.records import find_records, read_records, shipped_records
from experiments.study import Study, load_study
from experiments.study_folder import StudyManifest
from hyperfl_flwr import ROOT
from hyperfl_flwr.metrics.intervals import of_mean
from scripts import page_tables
from scripts.page_tables import Figure, GridTable, RowTable, Table
from scripts.study_tables import StudyTable

STUDY = load_study("table-1")


in_a_checkout = pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="needs a checkout of the project")


def generate_results() -> ModuleType:
    """Return the module of `make results`."""
    specification = importlib.util.spec_from_file_location("generate_results", ROOT / "scripts" / "generate_results.py")
    assert specification is not None
    assert specification.loader is not None
    generator = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = generator  # its dataclasses look it up
    specification.loader.exec_module(generator)
    return generator


@in_a_checkout
def test_the_pages_mark_what_is_out_of_date(tmp_path: Path) -> None:
    """The row of a method of which the golden numbers have changed since has the mark, and no other row."""
    text, of_code = find_records("table-4").read_text(), fingerprints({"method": "hyperfl"})["hyperfl"]
    (tmp_path / "changed.jsonl").write_text(text.replace(of_code, "0" * 12))
    seconds = {"seconds per round": ("seconds_per_round", one_digit)}
    lines = [
        Table(records=str(file), column="fashion-mnist", numbers=seconds).lines()
        for file in (find_records("table-4"), tmp_path / "changed.jsonl")
    ]
    changed = [other for one, other in zip(*lines, strict=True) if one != other]
    assert len(changed) == 1
    assert changed[0].startswith("| HyperFL (out of date) |")


@in_a_checkout
def test_a_whole_table_marks_all_rows_of_a_run_that_is_out_of_date(tmp_path: Path) -> None:
    """Three rows show numbers of pFedHN's runs; all numbers stay."""
    text, of_code = find_records("it-pfl-omniglot").read_text(), fingerprints({"method": "pfedhn"})["pfedhn"]
    (tmp_path / "changed.jsonl").write_text(text.replace(of_code, "0" * 12))
    before, after = (StudyTable(records=name).lines() for name in ("it-pfl-omniglot", f"{tmp_path}/changed.jsonl"))
    assert [line.replace(" (out of date)", "") for line in after] == before
    marked = [line.split(" | ")[0] for line in after if "out of date" in line]
    assert marked == [f"| pFedHN-{way} (out of date)" for way in ("sampled", "ensemble", "nearest")]


@in_a_checkout
def test_a_page_says_which_seeds_and_clients_a_mean_is_not_over(tmp_path: Path) -> None:
    """One of three seeds has no accuracy, another one that of 7 of the 20 clients."""
    column, lines = "fashion-mnist-20", []
    changes = {1: {"test_accuracy": None}, 2: {"test_accuracy": 0.5, "test_accuracy_num_clients": 7}}
    for line in map(json.loads, find_records("table-1").read_text().splitlines()):
        if line.get("row") == "local":
            line["summary"] |= {"test_accuracy": 0.25} | changes.get(line["seed"], {})
        lines.append(json.dumps(line) + "\n")
    (tmp_path / "changed.jsonl").write_text("".join(lines))
    table = Table(records=str(tmp_path / "changed.jsonl"), column=column, numbers={"": ("test_accuracy", two_digits)})
    shown = {line.split(" | ")[0]: line.split(" | ")[1] for line in table.lines() if line.startswith("| ")}
    assert shown["| Local-only"].removesuffix(" |") == "0.38 ± 0.18 (2 of 3 seeds, 7 of 20 clients)"  # 0.25 and 0.5
    assert "(" not in shown["| FedAvg"]


@in_a_checkout
def test_a_page_shows_the_mean_over_some_clients(tmp_path: Path) -> None:
    """Of each seed; a seed in which one of them has no accuracy is left out."""
    lines = []
    for line in map(json.loads, find_records("table-1").read_text().splitlines()):
        if line.get("row") == "local":
            line["summary"]["test_accuracy_per_client"][:3] = [0.2, 0.9, None if line["seed"] == 2 else 0.4]
        lines.append(json.dumps(line) + "\n")
    (tmp_path / "changed.jsonl").write_text("".join(lines))
    numbers = {text: (f"clients:{text}:test_accuracy", two_digits) for text in ("0,2", "0,1")}
    table = Table(records=str(tmp_path / "changed.jsonl"), column="fashion-mnist-20", numbers=numbers)
    (found,) = [line for line in table.lines() if line.startswith("| Local-only ")]
    assert found == "| Local-only | 0.30 (2 of 3 seeds) | 0.55 |"


@in_a_checkout
def test_a_page_shows_the_papers_numbers_of_another_column() -> None:
    """Fashion-MNIST takes the place of EMNIST, of which HyperFL's Table 3 has 32.64 dB for FedAvg."""
    papers = {"paper, EMNIST": "emnist", "paper, CIFAR-10": "cifar10"}
    table = Table(records="audit-table-3", column="fashion-mnist", rows=["fedavg"], numbers={}, papers=papers)
    first, _, second, *_ = table.lines()
    assert first == "| | paper, EMNIST | paper, CIFAR-10 |"
    assert second == "| FedAvg, gradient inversion | 32.64 | 16.16 |"


@in_a_checkout
def test_a_page_compares_a_row_with_the_same_clients(tmp_path: Path) -> None:
    """A row with another number of seeds than the reference is compared over those that both have, and it says so."""

    def differences(records: Path | str) -> dict[str, str]:
        table = Table(
            records=str(records), column="cifar10-20", numbers={}, against="local-tuned", papers={"paper": "cifar10-20"}
        )
        lines = [[text.strip() for text in line.split("|")[1:-1]] for line in table.lines() if line.startswith("|")]
        return {line[0]: line[1] for line in lines[2:]}

    both = differences("private-table-1")
    assert len(both) > 5
    assert both.pop("Local-only, tuned rate") == "reference"
    assert all(re.fullmatch(r"[+-]\d+\.\d \([+-]\d+\.\d to [+-]\d+\.\d\)", text) for text in both.values())
    lines = find_records("private-table-1").read_text().splitlines(keepends=True)
    removed = '{"row": "local-tuned", "column": "cifar10-20", "seed": 1'
    (tmp_path / "one.jsonl").write_text("".join(line for line in lines if not line.startswith(removed)))
    one = differences(tmp_path / "one.jsonl")
    assert one.pop("Local-only, tuned rate (1 of 2 seeds)") == "reference"
    assert one.keys() == both.keys()
    assert all(text.endswith(", 1 seed)") for text in one.values())


@in_a_checkout
@pytest.mark.parametrize("row", ["fedavg", "hyperfl", "scaffold"])
def test_a_table_of_one_row_has_its_line_in_the_table_of_each_column(row: str) -> None:
    study, records = load_study("personalized"), read_records(find_records("personalized"))
    numbers = {"": ("test_accuracy", in_percent)}
    (label,) = [each.label for each in study.rows if each.name == row]
    expected = {}
    for column in study.columns:
        lines = Table(records="personalized", column=column.name, numbers=numbers, against="fedavg").lines()
        (line,) = [line for line in lines if re.match(rf"\| {label}( \(\d of \d seeds\))? \|", line)]
        seeds = sum(place[:2] == (row, column.name) for place in records.cells)
        _, accuracy, difference = line.strip("| ").split(" | ")
        expected[column.label] = [str(seeds), accuracy, *([] if row == "fedavg" else [difference])]
    lines = RowTable(records="personalized", row=row, numbers=numbers, against="fedavg").lines()
    shown = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    assert {name: values for name, *values in shown[1:]} == expected
    seeds = max(int(values[0]) for values in expected.values())
    assert lines[-1].startswith(f"`hyperfl study personalized --rows {row} --seeds {seeds}`; commit ")


@in_a_checkout
def test_the_page_has_what_malicious_nodes_cost_the_same_clients() -> None:
    """The accuracies of the honest clients beside those of the same clients in the run without malicious nodes."""
    cells = read_records(find_records("what-to-choose")).cells

    def costs(row: str, column: str) -> tuple[float, str]:
        """Return the mean cost in points, and its 95 % interval over the honest clients."""
        clean, attacked = (cells[row, name, 0]["summary"]["test_accuracy_per_client"] for name in ("accuracy", column))
        honest = [client for client, accuracy in enumerate(attacked) if accuracy is not None]
        assert len(honest) == 8
        lost = [100 * (clean[client] - attacked[client]) for client in honest]
        low, high = of_mean(mean := statistics.fmean(lost), statistics.stdev(lost), len(lost)) or (0, 0)
        return round(mean, 1), f"{low:.1f} to {high:.1f}"

    flips = {row: costs(row, "sign-flip") for row in ("fedavg", "fedrep", "pfedhn", "hyperfl")}
    hidden = {row: costs(row, "alie")[0] for row in (*flips, "hyperfl-frozen")}
    noisy = {row: costs(f"{row}-clients", "alie") for row in ("fedavg", "hyperfl")}
    assert max(hidden.values()) == 0
    assert all(interval.startswith("-") for _, interval in (flips["hyperfl"], *noisy.values()))
    won_back = flips["fedavg"][0] - costs("fedavg", "sign-flip-krum")[0]
    text = " ".join((ROOT / "docs" / "privacy" / "what-to-choose.md").read_text().split())
    named = {row: f"{cost} ({interval})" for row, (cost, interval) in flips.items()}
    for sentence in (
        f"FedRep {named['fedrep'].replace(' (', ' points by sign flips (')} and pFedHN {named['pfedhn']}; FedAvg's "
        f"{named['fedavg']} and HyperFL's {flips['hyperfl'][0]} may be chance",
        f"FedAvg has {-noisy['fedavg'][0]} points more, HyperFL {noisy['hyperfl'][0]} less",
        f"Multi-Krum wins back {won_back:.1f} of FedAvg's points",
    ):
        assert sentence in text


def drawn(figure: Figure, picture: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, dict[str, str], set[str]]:
    """Draw a figure; return its title, the labels of the study's rows in it, and the rows that it had cells of."""
    found: list[tuple[str, dict[str, str], set[str]]] = []

    def draw_and_look(study: Study, begun: StudyManifest, folder: Path, kind: str, **others: Any) -> list[Path]:
        rows = {path.parent.parent.parent.name for path in folder.glob("*/*/*/summary.json")}
        found.append((study.title, {row.name: row.label for row in study.rows}, rows))
        return draw(study, begun, folder, kind, **others)

    monkeypatch.setattr(page_tables, "draw", draw_and_look)
    figure.write(picture)
    return found[-1]


def test_figures_mark_what_is_out_of_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stale records are drawn: the legend and the title name their rows, and the picture's hash is another one."""
    file, text = find_records("property"), find_records("property").read_text()
    title, labels, rows = drawn(Figure(records=str(file), kind="property"), tmp_path / "before.png", monkeypatch)
    assert (tmp_path / "before.sha256").read_text() == hashlib.sha256(file.read_bytes()).hexdigest() + "\n"
    assert "out of date" not in title + str(labels)
    of_code = fingerprints({"method": "fedrep"})["fedrep"]
    (tmp_path / "one.jsonl").write_text(text.replace(of_code, "0" * 12))
    # Cells of other settings are refused unless they are known to be stale.
    (tmp_path / "all.jsonl").write_text(text.replace('"num-clients": 4', '"num-clients": 5'))
    for name, stale in (("one", {"fedrep", "fedrep-epsilon-8"}), ("all", rows)):
        figure = Figure(records=str(tmp_path / f"{name}.jsonl"), kind="property")
        now, marked, still = drawn(figure, tmp_path / f"{name}.png", monkeypatch)
        assert still == rows
        assert marked == {row: label + " (out of date)" * (row in stale) for row, label in labels.items()}
        which = "all rows" if name == "all" else f"{labels['fedrep']}; {labels['fedrep-epsilon-8']}"
        assert now == f"{title}\nout of date: {which}"
        assert figure.fingerprint() != hashlib.sha256((tmp_path / f"{name}.jsonl").read_bytes()).hexdigest()
    chosen = Figure(records=str(tmp_path / "one.jsonl"), kind="property", rows=("fedavg",))
    assert "out of date" not in drawn(chosen, tmp_path / "chosen.png", monkeypatch)[0]
    assert chosen.fingerprint() == hashlib.sha256((tmp_path / "one.jsonl").read_bytes()).hexdigest()


def test_a_curve_of_a_record_of_other_settings_is_drawn(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a number of summary.json against a setting."""
    record(STUDY, folder, tmp_path / "records.jsonl")
    file = tmp_path / "stale.jsonl"
    file.write_text((tmp_path / "records.jsonl").read_text().replace('"momentum": 0.5', '"momentum": 0.25'))
    for kind in ("personalized_accuracy", "test_accuracy@num-clients"):
        title, labels, rows = drawn(Figure(records=str(file), kind=kind), tmp_path / "picture.png", monkeypatch)
        assert title.endswith("\nout of date: all rows")
        assert {row for row, label in labels.items() if label.endswith(" (out of date)")} == {"fedavg", "local"} == rows


@in_a_checkout
def test_a_table_of_a_grid_has_the_numbers_of_its_records(tmp_path: Path) -> None:
    """The best number of a line is bold, a run without a record is a dash, and a method without any has no line."""
    text = find_records("tuning").read_text()
    kept = [line for line in text.splitlines() if not re.search(r'"row": ?"(ditto@|fedavg@0.05")', line)]
    (tmp_path / "fewer.jsonl").write_text("\n".join(kept))
    whole, fewer = (grid_table(str(file)) for file in (find_records("tuning"), tmp_path / "fewer.jsonl"))
    cells = read_records(find_records("tuning")).cells.items()
    summaries = {row: cell["summary"] for (row, column, _), cell in cells if column == "digits"}
    fedavg = {rate: summaries[f"fedavg@{rate}"] for rate in ("0.003", "0.01", "0.03", "0.05", "0.1")}
    best = max(fedavg, key=lambda rate: fedavg[rate]["test_accuracy"])
    for rate, summary in fedavg.items():
        own, received = (f"{100 * summary[f'test_accuracy{end}']:.1f}" for end in ("", "_aggregate"))
        assert whole["FedAvg"][rate] == (f"**{own}** ({received})" if rate == best else f"{own} ({received})")
    assert fewer == {label: line for label, line in whole.items() if label != "Ditto"} | {
        "FedAvg": whole["FedAvg"] | {"0.05": "–"}
    }


@in_a_checkout
def test_a_table_of_a_grid_can_have_some_rows_in_another_order() -> None:
    """Their lines are those of the whole table, with the rates that these rows have; the command names them."""
    records = str(find_records("tuning"))
    whole, some = grid_table(records), grid_table(records, rows=("fedgen", "fedavg"))
    assert list(some) == ["FedGen", "FedAvg"]
    assert list(some["FedAvg"]) == ["0.003", "0.01", "0.03", "0.05", "0.1"]
    assert some == {label: whole[label] for label in some}
    (source,) = [line for line in rates_table(records, rows=("local", "fedavg")).lines() if line.startswith("`hyperfl")]
    assert source.startswith("`hyperfl study tuning --columns digits --rows local,fedavg --seeds 1`; commit ")


def rates_table(records: str, rows: Sequence[str] = ()) -> GridTable:
    return GridTable(
        records=records, column="digits", setting="learning-rate", number="test_accuracy",
        second="test_accuracy_aggregate", rows=rows,
    )  # fmt: skip


def grid_table(records: str, rows: Sequence[str] = ()) -> dict[str, dict[str, str]]:
    """Return the numbers of the table of rates on digits, by the label of a line and the rate."""
    table = rates_table(records, rows)
    heading, _, *lines = ([text.strip() for text in line.split("|")[1:-1]] for line in table.lines())
    return {line[0]: dict(zip(heading[1:], line[1:], strict=True)) for line in lines if line}


@in_a_checkout
def test_the_pages_have_the_numbers_of_the_records() -> None:
    """A picture has the hash of the records that it was drawn from."""
    generator = generate_results()
    assert generator.TABLES
    for name in generator.TABLES:
        text = (ROOT / "docs" / name).read_text()
        assert text == generator.page_text(name), f"{name} is old; run `make results`"
    for name, figure in generator.FIGURES.items():
        picture = ROOT / "docs" / "pictures" / name
        assert picture.with_suffix(".sha256").read_text() == f"{figure.fingerprint()}\n", f"{name} is old"
    shown = [table for tables in generator.TABLES.values() for table in tables.values()]
    used = {table.records for table in shown if hasattr(table, "records")}
    assert used | {figure.records for figure in generator.FIGURES.values()} == set(shipped_records())


@in_a_checkout
def test_a_figure_names_rounds_that_not_all_seeds_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of FedRep's clients diverged in the last round with one of three seeds: two are no mean of three."""
    labels: list[str] = []
    monkeypatch.setattr(Axes, "set_xlabel", lambda panel, text: labels.append(text))
    Figure(records="table-1", kind="personalized_accuracy").write(tmp_path / "picture.png")
    assert labels == ["round\nFedRep: round 200 left out, as not all seeds have it"]
