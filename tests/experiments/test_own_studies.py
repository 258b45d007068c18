"""Studies of one's own: files of users, and sweeps."""

import json
from pathlib import Path

import numpy as np
import pytest
from federations import Call

from experiments.prepared_data import refuse_missing
from experiments.study import load_study, parse_study
from experiments.sweep import make_sweep, parse_grid, refuse_chosen, sweep_text, without_effect_on_some
from experiments.tables import with_metric
from experiments.units import has_aggregate
from hyperfl_flwr.core.errors import ConfigError, RunDirectoryError

TINY = ("data.train-samples=20", "data.test-samples=10", "local-epochs=1", "batch-size=10")


def test_a_file_needs_rows_only(tmp_path: Path) -> None:
    """Everything else has a default, and its name is the study's."""
    file = tmp_path / "mine.toml"
    file.write_text('[rows.fedavg]\nmethod = "fedavg"\n[rows.fedprox]\nmethod = "fedprox"\nfedprox.mu = 0.5\n')
    study = load_study(str(file))
    assert (study.name, study.title, study.metric, study.unit) == ("mine", "mine", "test_accuracy", "%")
    cells = study.cells()
    assert [str(cell) for cell in cells] == ["fedavg, all, seed 0", "fedprox, all, seed 0"]
    assert cells[1].settings["fedprox.mu"] == 0.5
    (tmp_path / "numbers.csv").write_text("row,column,value,source\nfedavg,all,90,Table 1\n")
    study = parse_study(f'paper = "numbers.csv"\n{file.read_text()}', file)
    assert study.paper["fedavg", "all"].value == 90


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("rows = 3", "in .*mine.toml, rows must be a table; got 3"),
        ("[rows]\nfedavg = 3", "rows.fedavg must be a table; got 3"),
        ("[rows.fedavg]\nlabel = 3", "rows.fedavg.label must be a valid string; got 3"),
        ("[rows.fedavg]\non = 3", "rows.fedavg.on must be a table; got 3"),
        ('seeds = "2"\n[rows.fedavg]', "seeds must be a valid integer; got '2'"),
        ("num-nodes = 0\n[rows.fedavg]", "num-nodes must be greater than 0; got 0"),
        ("title = 3\n[rows.fedavg]", "title must be a valid string; got 3"),
        ('figures = "labels"\n[rows.fedavg]', "figures must be a valid list; got 'labels'"),
        ('[quick]\nrows = "fedavg"\n[rows.fedavg]', "quick.rows must be a valid list; got 'fedavg'"),
        ("[grid]\nmomentum = 0.5\n[rows.fedavg]", "grid.momentum must be a valid list; got 0.5"),
        ("[grid]\nmomentum = []\n[rows.fedavg]", "grid.momentum .*at least 1 item"),
        ("[rows.fedavg]\nmomentum = [0.5]", "momentum must be a valid number; got"),
        ('paper = "missing.csv"\n[rows.fedavg]', "cannot read the paper's numbers, .*missing.csv: No such file"),
        ("", r"has no rows; give at least one, such as \[rows.fedavg\]"),
        ("=", "is not TOML"),
        ('metrics = "x"\n[rows.fedavg]', "metrics is unknown; did you mean metric"),
        ('[rows."a/b"]', "rows has 'a/b', which cannot be the name of a folder"),
        ("[rows.fedavg]\nmu = 1", "in mine, row fedavg, column all: mu is unknown"),
        ("[columns.c]\n[rows.fedavg.on.d]\nmomentum = 0.5", r"rows\.fedavg\.on\.d is for a column .*; it has c"),
        ('[columns.c]\n[rows.fedavg.on.d]\nmissing = "slow"', r"rows\.fedavg\.on\.d is for a column"),
    ],
)
def test_a_wrong_file_is_refused(text: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse_study(text, tmp_path / "mine.toml").cells()
    with pytest.raises(ConfigError, match="cannot read the study"):
        load_study(str(tmp_path / "missing.toml"))
    with pytest.raises(ConfigError, match=r"a file of your own is named with its ending, \.toml"):
        load_study("missing")


@pytest.mark.parametrize(
    "text",
    [
        "row,column,value\nfedavg,all,90\n",
        "row,column,value,source\nfedavg,all,ninety,Table 1\n",
        "row,column,value,source\nfedavgg,all,90,Table 1\n",
    ],
)
def test_wrong_numbers_of_a_paper_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "numbers.csv").write_text(text)
    with pytest.raises(ConfigError, match=r"numbers.csv: each line needs a row and a column of the study, a value"):
        parse_study('paper = "numbers.csv"\n[rows.fedavg]', tmp_path / "mine.toml")


def test_another_number_of_a_sweep_is_that_of_each_column(tmp_path: Path) -> None:
    """The column of the models as received shows the number of those models."""
    text = sweep_text(["fedavg"], {"digits": "digits"}, 1, {"num-rounds": 3}, {})
    study = with_metric(parse_study(text, tmp_path / "sweep.toml"), "test_balanced_accuracy")
    assert [study.metric_of(study.rows[0], column) for column in study.columns] == [
        "test_balanced_accuracy", "test_balanced_accuracy_aggregate",
    ]  # fmt: skip
    for metric in ("backdoor_success", "best_round", "best_accuracy", "rounds_to_target", "validation_mse"):
        assert has_aggregate(metric), metric
    assert not has_aggregate("test_accuracy_std")


@pytest.mark.parametrize("metric", ["test_accuracy_aggregate", "test_accuracy_worst", "bytes_up_per_client_round"])
def test_a_number_without_two_forms_is_shown_once(metric: str, tmp_path: Path) -> None:
    """The heading names it, also where a study has no columns of its own."""
    text = sweep_text(["fedavg"], {"digits": "digits", "mine": "npz:/my.npz"}, 1, {"num-rounds": 3}, {})
    study = with_metric(parse_study(text, tmp_path / "sweep.toml"), metric)
    assert [column.label for column in study.columns] == [f"digits, {metric}", f"mine, {metric}"]
    assert {study.metric_of(study.rows[0], column) for column in study.columns} == {metric}
    own = '[rows.fedavg]\n[columns.a]\n[columns.b]\nlabel = "received"\nmetric = "test_accuracy_aggregate"\n'
    apart = with_metric(parse_study(own, tmp_path / "apart.toml"), metric)
    assert apart.columns[1].label == f"received, {metric}"
    alone = with_metric(parse_study("[rows.fedavg]\n", tmp_path / "mine.toml"), metric)
    assert [(column.label, alone.metric_of(alone.rows[0], column)) for column in alone.columns] == [(metric, metric)]


def test_a_sweep_combines_everything(tmp_path: Path) -> None:
    """A data set has a column of its personalized accuracy, and one of the aggregate accuracy of the same runs."""
    grid = parse_grid(["learning-rate=0.01, 0.1", "momentum=0.5"])
    assert grid == {"learning-rate": [0.01, 0.1], "momentum": [0.5]}
    text = sweep_text(
        ["fedavg", "local"], {"digits": "digits", "npz:my.npz": "npz:/data/my.npz"}, 2, {"num-rounds": 3}, grid
    )
    study = parse_study(text, tmp_path / "sweep.toml")
    assert [row.name for row in study.rows] == [
        f"{method}@{rate}@0.5" for method in ("fedavg", "local") for rate in (0.01, 0.1)
    ]
    assert [column.name for column in study.columns] == ["digits", "digits-aggregate", "data-1", "data-1-aggregate"]
    cells = study.cells()
    assert len(cells) == 2 * 2 * 2 * 2
    assert {(cell.config.method, cell.config.learning_rate, cell.config.dataset, cell.seed) for cell in cells} == {
        (method, rate, data, seed)
        for method in ("fedavg", "local") for rate in (0.01, 0.1) for data in ("digits", "npz:/data/my.npz")
        for seed in (0, 1)
    }  # fmt: skip
    assert {cell.config.num_rounds for cell in cells} == {3}


def test_wrong_sweeps_are_refused() -> None:
    for wrong in ("learning-rate", "=1", "learning-rate=", "learning-rate=1,,2"):
        with pytest.raises(ConfigError, match="must have the form KEY=VALUE,VALUE"):
            parse_grid([wrong])
    with pytest.raises(ConfigError, match="the method local is given twice"):
        sweep_text(["local", "local"], {"digits": "digits"}, 1, {}, {})
    text = sweep_text(["local"], {"digits": "digits"}, 1, {}, parse_grid(["learning-rate=0.1,1e-1"]))
    with pytest.raises(ConfigError, match=r"the grid has a value twice: local@0\.1;"):
        parse_study(text, Path("sweep.toml"))


def test_a_sweep_ignores_no_option() -> None:
    grid = parse_grid(["learning-rate=0.05", "learning-rate=0.1"])
    assert grid == {"learning-rate": [0.05, 0.1]}
    for key, option in (("dataset", "--datasets"), ("seed", "--seeds"), ("learning-rate", "--grid")):
        with pytest.raises(ConfigError, match=f"a sweep takes {key} from {option}; leave it out"):
            refuse_chosen({key: 7}, grid)
    refuse_chosen({"num-rounds": 1}, grid)


def test_a_sweep_warns_of_settings_that_some_of_its_methods_do_not_have() -> None:
    grid = parse_grid(["fedprox.mu=0.1,0.5", "learning-rate=0.1,0.2"])
    warnings = without_effect_on_some(["fedavg", "fedprox"], {"ditto.mu": 1.0}, grid)
    of_grid = "fedprox.mu has no effect on fedavg; it is a setting of fedprox; its cells with several values of it "
    assert [text for text in warnings if "fedprox.mu" in text] == [f"{of_grid}train the same model"]
    of_all = [text for text in warnings if text.startswith("ditto.mu has no effect on ")]
    assert len(of_all) == 2
    assert len(warnings) == 3


def test_a_refused_sweep_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    """The file still describes the runs in the folder."""
    study = make_sweep(tmp_path, ["fedavg"], {"digits": "digits"}, 1, {"num-rounds": 3}, {})
    before, (cell,) = (tmp_path / "sweep.toml").read_bytes(), study.cells()
    cell.folder(tmp_path).mkdir(parents=True)
    document = {"settings": cell.settings, "status": "running", "experiment": ""}
    (cell.folder(tmp_path) / "manifest.json").write_text(json.dumps(document))
    with pytest.raises(RunDirectoryError, match="num-rounds 3 instead of 4"):
        make_sweep(tmp_path, ["fedavg"], {"digits": "digits"}, 1, {"num-rounds": 4}, {})
    assert (tmp_path / "sweep.toml").read_bytes() == before


def test_a_finished_cell_of_changed_data_is_named(tmp_path: Path, call: Call) -> None:
    """Its numbers are not those of the file as it is now; a cell of the same samples is finished, without a note."""
    file, study = tmp_path / "mine.npz", tmp_path / "mine.toml"
    study.write_text(f'[settings]\ndataset = "npz:{file}"\n[rows.local]\nmethod = "local"\n')
    words = ["study", str(study), "--seeds", "1", "--jobs", "1", "--output", str(tmp_path / "runs")]
    words += [word for text in (*TINY, "num-clients=2", "num-rounds=1", "target=mlp") for word in ("--set", text)]
    rng = np.random.default_rng(0)
    images = rng.integers(0, 255, (120, 8, 8), dtype=np.uint8)
    for change, is_named in ((0, False), (0, False), (1, True)):
        images[0, 0, 0] ^= change
        np.savez(file, images=images, labels=np.arange(120) % 3)
        code, _, problem = call(*words)
        assert code == 0, problem
        assert (f"finished earlier: npz:{file} has changed, its SHA-256 was " in " ".join(problem.split())) == is_named


def test_a_study_whose_data_are_not_made_names_the_command(call: Call, tmp_path: Path) -> None:
    """All files that are missing are named before anything is run; quick runs need none of them."""
    code, out, err = call("study", "it-pfl-table-2", "--columns", "geo-300,geo-1k")
    assert (code, out) == (2, "")
    made = "made by: hyperfl features --split iNaturalist_train.csv --column geo_"
    assert f"geo-300 needs inaturalist-geo-300.npz in the folder of --data-root, which is not given, {made}300" in err
    assert f"geo-1k needs inaturalist-geo-1k.npz in the folder of --data-root, which is not given, {made}1k" in err
    (tmp_path / "inaturalist-geo-300.npz").touch()
    code, _, err = call("study", "it-pfl-table-2", "--data-root", tmp_path)
    assert (code, "geo-300 needs" in err) == (2, False)
    assert (
        f"user-160k needs {tmp_path / 'landmarks-user-160k.npz'}, made by: hyperfl features --split federated_" in err
    )
    study = load_study("it-pfl-table-2")
    refuse_missing(study, study.cells(quick=True))


def test_the_users_of_table_2_are_the_papers() -> None:
    """A tenth of the users is novel (IT-PFL, section 6.1), and their numbers are those of section 6.4."""
    cells = {cell.column: cell.config for cell in load_study("it-pfl-table-2").cells(rows=["it-pfl"])}
    users = {name: (config.num_clients + config.novel.clients, config.novel.clients) for name, config in cells.items()}
    assert users == {"geo-300": (1208, 121), "geo-1k": (368, 37), "user-160k": (1262, 126)}
