"""Studies with many adversaries: the strongest attack of a cell, pairs that cannot be run, and the table of all."""

import json
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from experiments.attack_cell import run_attack
from experiments.attack_settings import AttackedCell
from experiments.matrix import NOT_RUN, WHAT_TO_CHOOSE, Matrix, images, seconds_of
from experiments.records import find_records, read_records
from experiments.study import load_study, parse_study
from hyperfl_flwr.attacks.registry import attacks_on
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.config.table import default_settings
from hyperfl_flwr.contract.base import SMALL
from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.methods import METHODS

STUDY = """
[settings]
dataset = "digits"
[rows.fedavg]
method = "fedavg"
on.krum.missing = "no single nodes"
[rows.local]
missing = "nothing is sent"
[columns.plain]
label = "plain"
[columns.krum]
robust.reduction = "krum"
[columns.received]
run = "krum"
metric = "test_accuracy_aggregate"
"""


def test_a_cell_of_several_attacks_has_the_numbers_of_the_strongest(tmp_path: Path) -> None:
    settings = {"method": "fedrep", "target": "mlp", "learning-rate": 0.01}
    cell = {"attack.name": "imprint,trap-weights", "attack.num-images": 12, "attack.batch-size": 12}
    run_attack(RunConfig.from_flat(default_settings() | SMALL | settings), cell, tmp_path / "cell")
    summary = json.loads((tmp_path / "cell" / "summary.json").read_text())
    audit = json.loads((tmp_path / "cell" / "audit.json").read_text())
    assert audit["malicious_server"]
    found = {name: (each["images_recovered"], each["psnr"]["mean"]) for name, each in audit["attacks"].items()}
    assert set(found) == {"imprint", "trap-weights"}
    assert summary["strongest"] == max(found, key=lambda name: found[name])
    assert (summary["images_recovered"], summary["psnr"]) == max(found.values())
    assert {name: each["psnr"] for name, each in summary["attacks"].items()} == {
        name: psnr for name, (_, psnr) in found.items()
    }
    assert images({"malicious_server": summary}).startswith(f"**recovered**: {summary['images_recovered']} of 12; ")


def test_an_unknown_attack_among_several_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"attack\.name must be one of ig, .*, or several attacks with commas between them; got 'igg'"
    ):
        AttackedCell.of({"attack.name": "ig,igg"})


def test_a_pair_of_row_and_column_can_be_missing(tmp_path: Path) -> None:
    """The reason holds for columns that show the same runs, too."""
    study = parse_study(STUDY, tmp_path / "own.toml")
    assert [str(cell) for cell in study.cells()] == ["fedavg, plain, seed 0"]
    fedavg, local = study.rows
    assert [fedavg.why_missing(column) for column in study.columns] == ["", "no single nodes", "no single nodes"]
    assert {local.why_missing(column) for column in study.columns} == {"nothing is sent"}


def test_the_table_explains_what_it_does_not_show(tmp_path: Path) -> None:
    """Of the project's own records one line is left out: its cells say so, and each letter is in the list."""
    kept = [line for line in find_records("what-to-choose").read_text().splitlines()
            if '"row": "fedavg", "column": "accuracy"' not in line]  # fmt: skip
    (tmp_path / "kept.jsonl").write_text("\n".join(kept) + "\n")
    lines = Matrix(records=str(tmp_path / "kept.jsonl"), shown=WHAT_TO_CHOOSE).lines()
    table = {line.split(" | ")[0].strip("| "): line.strip("| ").split(" | ") for line in lines if line.startswith("|")}
    assert table["FedAvg"][1:3] == [NOT_RUN, NOT_RUN]
    study = load_study("what-to-choose")
    assert [row.label for row in study.rows] == list(table)[2:]
    used = {cell for cells in table.values() for cell in cells if cell.startswith("– (")}
    explained = {f"– {line.split()[1]}" for line in lines if line.startswith("- (")}
    assert used == explained


def test_the_time_between_the_parts_of_a_resumed_run_is_not_counted() -> None:
    """Recorded is a run that was resumed twice in seven hours; its 20 rounds took about half an hour."""
    cell = read_records(find_records("personalized")).cells["pfedme", "fashion-mnist", 0]
    assert len(cell["manifest"]["resumed"]) == 2
    assert seconds_of(cell) == pytest.approx(20 * cell["summary"]["seconds_per_round"])
    begun = datetime.fromisoformat(cell["manifest"]["start"])
    straight = {"start": cell["manifest"]["start"], "end": str(begun + timedelta(seconds=7)), "resumed": []}
    assert seconds_of(cell | {"manifest": straight}) == 7


def test_no_cell_of_a_malicious_server_is_left_out_if_an_attack_applies() -> None:
    """A method without its own row of attacks must be one of which nothing can be forged."""
    study = load_study("what-to-choose")
    (column,) = (column for column in study.columns if column.name == "malicious-server")
    left_out = {row.label: METHODS[str(row.settings["method"])] for row in study.rows
                if "method" in row.settings and row.why_missing(column)}  # fmt: skip
    assert left_out
    possible = {label: attacks_on(row.uploads, malicious_server=True) for label, row in left_out.items()}
    assert {label: names for label, names in possible.items() if names} == {}
