"""Records of a study: small files with which tables and figures are made without the runs."""

import hashlib
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

from experiments import page_tables
from experiments.collect import collect
from experiments.figures.curves import draw
from experiments.golden import fingerprint, fingerprints, write_fingerprints
from experiments.number_formats import one_digit, two_digits
from experiments.page_tables import Figure, GridTable, Table
from experiments.records import Records, find_records, read_records, record, restore, shipped_records, stale_cells
from experiments.runner import StudyManifest, is_finished, read_study_manifest
from experiments.study import Study, load_study
from experiments.tables import comma_separated
from hyperfl_flwr import ROOT
from hyperfl_flwr.cli.main import cli
from hyperfl_flwr.core.errors import RunDirectoryError, StateError
from hyperfl_flwr.results.compare import compare
from hyperfl_flwr.results.report import write_report
from hyperfl_flwr.runs.run_directory import read_metrics

STUDY = load_study("table-1")


@pytest.fixture
def folder(quick_study: Callable[[str], Path], tmp_path: Path) -> Path:
    """Return a copy of the quick runs of two rows of `table-1`."""
    others = [row.name for row in STUDY.rows if row.name not in ("fedavg", "local")]
    ignored = shutil.ignore_patterns(*others, "table.*", "*.png", "checkpoints")
    return Path(shutil.copytree(quick_study("table-1"), tmp_path / "study", ignore=ignored))


def table_of(folder: Path) -> str:
    return comma_separated(collect(STUDY, read_study_manifest(folder), folder))


def test_a_table_of_records_is_that_of_the_runs(folder: Path, tmp_path: Path) -> None:
    """Restored cells count as finished; recorded again, they leave the file as it is."""
    file = tmp_path / "records.jsonl"
    cells = record(STUDY, folder, file)
    assert [cell.row for cell in cells] == ["local", "fedavg"]
    restored = tmp_path / "restored"
    assert restore(STUDY, read_records(file), restored) == {}
    assert all(is_finished(cell, restored) for cell in cells)
    assert table_of(restored) == table_of(folder)
    before = file.read_text()
    record(STUDY, restored, file)
    assert file.read_text() == before
    assert file.stat().st_size < 20_000
    assert str(tmp_path) not in before
    assert str(Path.cwd()) not in before


def test_records_keep_the_means_over_the_clients(folder: Path, tmp_path: Path) -> None:
    """Numbers of single clients are only those of summary.json."""
    file = tmp_path / "records.jsonl"
    cell = record(STUDY, folder, file)[-1]
    restore(STUDY, read_records(file), tmp_path / "restored")
    whole, kept = (list(read_metrics(cell.folder(path))) for path in (folder, tmp_path / "restored"))
    rounds = [line for line in whole if line["kind"] in ("train", "aggregate")]
    assert [(line["kind"], line["round"]) for line in kept] == [(line["kind"], line["round"]) for line in rounds]
    for before, after in zip(rounds, kept, strict=True):
        assert after.items() >= {"kind": before["kind"], "round": before["round"]}.items()
        accuracies = [key for key in before if key.endswith("_accuracy")]
        assert accuracies
        for key in accuracies:
            assert after[key] == pytest.approx(before[key], rel=1e-5)
    summaries = [
        json.loads((cell.folder(path) / "summary.json").read_text()) for path in (folder, tmp_path / "restored")
    ]
    lists = [{key: summary.pop(key) for key in list(summary) if key.endswith("_per_client")} for summary in summaries]
    assert summaries[0] == summaries[1]
    assert {"test_accuracy_per_client", "test_accuracy_aggregate_per_client"} <= set(lists[0])
    for key, values in lists[0].items():
        assert lists[1][key] == pytest.approx(values, rel=1e-5)


def test_restored_cells_are_compared_as_runs_are_and_have_no_report(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    cells = record(STUDY, folder, file)
    restore(STUDY, read_records(file), tmp_path / "restored")
    of_runs, of_records = (compare([cell.folder(path) for cell in cells]) for path in (folder, tmp_path / "restored"))
    for run, recorded in zip(of_runs.groups, of_records.groups, strict=True):
        assert recorded.label == run.label
        for name, spread in run.numbers.items():
            assert recorded.numbers[name].mean == pytest.approx(spread.mean, rel=1e-5)
    paired, recorded = of_runs.groups[1].difference, of_records.groups[1].difference
    assert paired is not None
    assert recorded is not None
    assert (recorded.mean, recorded.clients) == (pytest.approx(paired.mean, rel=1e-4), paired.clients)
    with pytest.raises(RunDirectoryError, match=r"was restored from a record.*needs the run's own folder"):
        write_report(cells[0].folder(tmp_path / "restored"))
    (cells[0].folder(tmp_path / "restored") / "summary.json").write_text("{")
    with pytest.raises(StateError, match=r"summary.json is damaged \(JSONDecodeError"):
        compare([cell.folder(tmp_path / "restored") for cell in cells])


def test_a_run_replaces_the_record_of_its_cell(folder: Path, tmp_path: Path) -> None:
    """Cells that are not in the folder stay in the file, in the order of the study."""
    file = tmp_path / "records.jsonl"
    record(STUDY, folder, file)
    shutil.rmtree(folder / "local")
    summary = next(folder.glob("fedavg/*/seed-0/summary.json"))
    summary.write_text(json.dumps(json.loads(summary.read_text()) | {"test_accuracy": 0.125}))
    assert len(record(STUDY, folder, file)) == 1
    cells = read_records(file).cells
    assert [row for row, _, _ in cells] == ["local", "fedavg"]
    assert [cell["summary"]["test_accuracy"] for cell in cells.values()][1] == 0.125


def test_a_record_of_other_settings_is_stale(folder: Path, tmp_path: Path) -> None:
    """It is named with the difference and not restored, so that the study runs the cell again."""
    file = tmp_path / "records.jsonl"
    record(STUDY, folder, file)
    (tmp_path / "stale.jsonl").write_text(file.read_text().replace('"momentum": 0.5', '"momentum": 0.25'))
    records = read_records(tmp_path / "stale.jsonl")
    places = [("local", "fashion-mnist-20", 0), ("fedavg", "fashion-mnist-20", 0)]
    expected = dict.fromkeys(places, "momentum 0.25 instead of 0.5")
    assert stale_cells(STUDY, records) == expected
    assert restore(STUDY, records, tmp_path / "restored") == expected
    assert not list((tmp_path / "restored").glob("*/*/*"))
    unknown = Records(
        study_manifest=records.study_manifest, bases=records.bases,
        cells={("gone", "fashion-mnist-20", 0): records.cells[places[0]]},
    )  # fmt: skip
    assert stale_cells(STUDY, unknown) == {("gone", "fashion-mnist-20", 0): "the study has no such cell"}


def test_a_record_of_code_that_has_changed_since_is_stale(folder: Path, tmp_path: Path) -> None:
    """A record has the fingerprints of the code that ran the cell, and needs those of the method and its noise."""
    file = tmp_path / "records.jsonl"
    record(STUDY, folder, file)
    records = read_records(file)
    place = ("fedavg", "fashion-mnist-20", 0)
    assert records.cells[place]["golden"] == {"fedavg": fingerprints({"method": "fedavg"})["fedavg"]}
    assert stale_cells(STUDY, records) == {}
    for golden, reason in (
        ({"fedavg": "0" * 12}, "the golden run of fedavg has other numbers by now"),
        ({}, "no golden run of fedavg is recorded"),
    ):
        changed = {**records.cells, place: {**records.cells[place], "golden": golden}}
        other = Records(study_manifest=records.study_manifest, bases=records.bases, cells=changed)
        assert stale_cells(STUDY, other) == {place: reason}
    noisy = {"method": "fedavg", "dp.epsilon": 4.0, "privacy.unit": "none", "attack.name": "ig"}
    assert set(fingerprints(noisy)) == {"fedavg", "fedavg with noisy steps", "ig"}
    assert fingerprints({"method": "mine:METHOD"}) == {}


def test_restored_cells_follow_their_records(folder: Path, tmp_path: Path) -> None:
    """Restored cells of changed records are replaced, those of stale records removed; runs stay."""
    file, restored = tmp_path / "records.jsonl", tmp_path / "restored"
    record(STUDY, folder, file)
    records = read_records(file)
    place = ("fedavg", "fashion-mnist-20", 0)
    path = restored / "fedavg" / "fashion-mnist-20" / "seed-0"

    def restore_with(**entries: object) -> None:
        changed = {**records.cells, place: {**records.cells[place], **entries}}
        restore(STUDY, Records(study_manifest=records.study_manifest, bases=records.bases, cells=changed), restored)

    restore_with()
    restore_with(summary={**records.cells[place]["summary"], "test_accuracy": 0.125})
    assert json.loads((path / "summary.json").read_text())["test_accuracy"] == 0.125
    (path / "manifest.json").unlink()  # an interrupted command
    restore_with()
    assert table_of(restored) == table_of(folder)
    restore_with(golden={})
    assert not path.exists()
    shutil.copytree(folder / "fedavg", restored / "fedavg", dirs_exist_ok=True)
    restore_with(golden={})
    assert table_of(restored) == table_of(folder)


@pytest.fixture
def commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the commits of a repository in which fedavg's golden numbers have changed and pfedhn's have not."""
    repository = tmp_path / "repository"
    file = repository / "experiments" / "expected" / "golden.json"
    file.parent.mkdir(parents=True)

    def git(*words: str) -> str:
        command = ["git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a@example.org", *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    git("init", "--quiet")
    found = []
    for number in range(2):
        file.write_text(json.dumps({"runs": {"fedavg": {"numbers": {"a": number}}, "pfedhn": {"numbers": {"a": 5}}}}))
        git("add", ".")
        git("commit", "--quiet", "--message", str(number))
        found.append(git("rev-parse", "HEAD"))
    monkeypatch.setattr("experiments.golden.ROOT", repository)
    monkeypatch.setattr("experiments.golden.FILE", file)
    return found


def test_a_resumed_cell_has_the_fingerprints_of_all_its_commits(folder: Path, commits: list[str]) -> None:
    """The last commit's alone would make earlier rounds look as if the current code had run them."""
    (cell,) = (path.parent for path in folder.glob("fedavg/*/seed-0/manifest.json"))
    manifest = json.loads((cell / "manifest.json").read_text())
    current = {"fedavg": fingerprint({"a": 1}), "pfedhn": fingerprint({"a": 5})}

    def kept(*codes: tuple[str, bool]) -> list[str]:
        first, *resumed = ({**manifest, "code": {"commit": commit, "dirty": dirty}} for commit, dirty in codes)
        (cell / "manifest.json").write_text(json.dumps({**first, "resumed": resumed}))
        write_fingerprints(cell, current)
        found = json.loads((cell / "golden.json").read_text())
        assert found.items() <= current.items()
        return list(found)

    old, new = commits
    assert kept((new, False), (new, False)) == ["fedavg", "pfedhn"]
    assert kept((old, False), (new, False)) == ["pfedhn"]
    assert kept((old, True), (new, False)) == []
    for unknown in ("0" * 40, ""):
        assert kept((unknown, False), (new, False)) == []


def test_files_of_something_else_are_refused(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    with pytest.raises(RunDirectoryError, match="there is no file of records nothing; known: "):
        find_records("nothing")
    for text in ("", "no JSON", '{"study": "table-1"}', '{"study": "table-1", "quick": true, "changes": {}}\n{}'):
        file.write_text(text)
        with pytest.raises(RunDirectoryError, match="is not a file of records"):
            read_records(file)
    file.unlink()
    record(STUDY, folder, file)
    with pytest.raises(RunDirectoryError, match="these are records of table-1, not of table-4"):
        restore(load_study("table-4"), read_records(file), tmp_path / "restored")
    text = file.read_text().replace('"quick": true', '"quick": false', 1)
    file.write_text(text)
    with pytest.raises(RunDirectoryError, match="choose another file"):
        record(STUDY, folder, file)


def test_the_commands(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`record` writes the file, and `table` and `figure` need nothing else."""
    monkeypatch.chdir(tmp_path)
    runner = CliRunner()
    for words, text in (
        (["record", "table-1", "kept.jsonl", "--output", str(folder)], "2 cells in kept.jsonl"),
        (["table", "table-1", "--quick", "--records", "kept.jsonl"], "| FedAvg |"),
        (["figure", "table-1", "--quick", "--records", "kept.jsonl"], "figure-personalized-accuracy.png"),
    ):
        result = runner.invoke(cli, words, catch_exceptions=False)
        assert (result.exit_code, text in result.output) == (0, True), result.output
    made = tmp_path / "runs" / "studies" / "table-1-quick-records"
    assert (made / "figure-personalized-accuracy.png").stat().st_size > 10_000
    assert table_of(made) == table_of(folder)


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
def test_a_page_compares_a_row_with_the_same_clients(tmp_path: Path) -> None:
    """A row with another number of seeds than the reference is compared over those that both have, and it says so."""

    def differences(records: Path | str) -> dict[str, str]:
        table = Table(records=str(records), column="cifar10-20", numbers={}, against="local-tuned", paper="paper")
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
def test_the_page_has_what_liars_cost_the_same_clients() -> None:
    """The accuracies of the honest clients beside those of the same clients in the run in which nobody lies."""
    cells = read_records(find_records("what-to-choose")).cells

    def cost(row: str, column: str) -> str:
        clean, attacked = (cells[row, name, 0]["summary"]["test_accuracy_per_client"] for name in ("accuracy", column))
        honest = [client for client, accuracy in enumerate(attacked) if accuracy is not None]
        assert len(honest) == 8
        return f"{100 * sum(clean[client] - attacked[client] for client in honest) / len(honest):.1f}"

    flips, hidden, noisy = (
        {row: cost(f"{row}{defence}", column) for row in rows}
        for rows, defence, column in (
            (("fedavg", "fedrep", "pfedhn", "hyperfl"), "", "sign-flip"),
            (("fedavg", "fedrep", "pfedhn", "hyperfl", "hyperfl-frozen"), "", "alie"),
            (("fedrep", "hyperfl"), "-clients", "alie"),
        )
    )
    assert max(map(float, hidden.values())) == 0
    won_back = float(flips["fedavg"]) - float(cost("fedavg", "sign-flip-krum"))
    text = " ".join((ROOT / "docs" / "privacy" / "what-to-choose.md").read_text().split())
    for sentence in (
        f"FedAvg {flips['fedavg']} points by sign flips, FedRep {flips['fedrep']}, pFedHN {flips['pfedhn']}, "
        f"HyperFL {flips['hyperfl']}; ALIE none without a defence.",
        f"ALIE costs HyperFL {noisy['hyperfl']} points, FedRep {noisy['fedrep']}",
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
    assert source.startswith("`hyperfl study tuning --datasets digits --methods local,fedavg --seeds 1`; commit ")


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


@pytest.mark.parametrize("name", shipped_records())
def test_the_project_s_own_records_belong_to_its_studies(name: str) -> None:
    """Every cell has its study, a summary, and a commit without uncommitted changes."""
    records = read_records(find_records(name))
    assert isinstance(records.study_manifest, StudyManifest)
    assert not records.study_manifest.quick
    stale = stale_cells(load_study(records.study_manifest.study), records)
    assert "the study has no such cell" not in stale.values()
    for recorded in records.cells.values():
        code = [recorded["manifest"]["code"], *(each["code"] for each in recorded["manifest"]["resumed"])]
        assert all(each["commit"] and not each["dirty"] for each in code)
        assert recorded["summary"]
