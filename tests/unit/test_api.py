"""The Python interface: it starts and resumes runs, reads their results, and refuses bad arguments."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from federations import repeated, small_settings, trained
from safetensors.torch import load_file

import hyperfl_flwr as hyperfl
from hyperfl_flwr import ROOT
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.contract.base import SMALL
from hyperfl_flwr.contract.grids import Settings
from hyperfl_flwr.core.errors import ConfigError, RunDirectoryError
from hyperfl_flwr.data.federated_data import load_federated_data
from hyperfl_flwr.launch.app_bundle import build_app
from hyperfl_flwr.launch.given_settings import changed_settings
from hyperfl_flwr.launch.simulation import simulation

PAGE = ROOT / "docs" / "how-to" / "python.md"

TINY: Settings = {**SMALL, "num-clients": 2, "num-rounds": 1}


def program(text: str, *words: object, folder: Path, code: int = 0) -> "subprocess.CompletedProcess[str]":
    """Run a program given as text, without file and terminal, in a fresh process, and check its exit code."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    command = [sys.executable, "-P", "-c", text, *map(str, words)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    return done


def test_importing_the_package_imports_nothing_of_it(tmp_path: Path) -> None:
    text = """
import sys
import hyperfl_flwr
print([name for name in sys.modules if name.startswith("hyperfl_flwr")], {"rich", "pydantic"} & set(sys.modules))
print(set(hyperfl_flwr.__all__) <= set(dir(hyperfl_flwr)), hasattr(hyperfl_flwr, "rum"))
from hyperfl_flwr import *
print(run.__module__, Run.__module__, {"flwr", "ray", "torch"} & set(sys.modules))
"""
    assert program(text, folder=tmp_path).stdout.splitlines() == [
        "['hyperfl_flwr'] set()",
        "True False",
        "hyperfl_flwr.api.train hyperfl_flwr.api.run set()",
    ]


def test_on_a_node_runs_cannot_be_started(tmp_path: Path) -> None:
    """The app sent to nodes lacks the Python interface; its names raise an error that says how to get it."""
    app = build_app(tmp_path / "app")
    text = """
import sys
sys.path[:] = [path for path in sys.path if path != sys.argv[1]]
import hyperfl_flwr
print(hyperfl_flwr.__file__, hyperfl_flwr.HyperFLError.__name__)
for name in ("run", "Run", "RunCallbacks", "compare", "deployment"):
    try:
        getattr(hyperfl_flwr, name)
    except AttributeError as error:
        print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", text, str(ROOT)], cwd=app, capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": ""},
    )  # fmt: skip
    first, *rest = done.stdout.splitlines()
    assert first == f"{app / 'hyperfl_flwr' / '__init__.py'} HyperFLError"
    advice = "is not in what travels to nodes; install hyperfl-flwr to start runs"
    assert rest == [f"hyperfl_flwr.{name} {advice}" for name in ("run", "Run", "RunCallbacks", "compare", "deployment")]


NOTEBOOK = """
import asyncio, json, signal, sys
import hyperfl_flwr as hyperfl

def interrupt(finished, total, accuracy):
    if finished:
        signal.raise_signal(signal.SIGINT)

async def cell():
    changes, notes = json.loads(sys.argv[1]), []
    changes |= {"num-rounds": 8, "local-epochs": 40, "checkpoint-every": 1}
    try:
        hyperfl.run(
            output="first", settings=changes, engine="in-process",
            progress=hyperfl.RunCallbacks(on_round=interrupt, on_note=notes.append),
        )
    except KeyboardInterrupt:
        print("; ".join(notes[-2:]))
    print(hyperfl.resume("first", engine="in-process").summary["rounds"])
    print(hyperfl.run(settings=changes, num_rounds=1, engine="in-process", progress=False).summary["rounds"])
    print("torch" in sys.modules, hasattr(sys.modules["__main__"], "__file__"))

asyncio.new_event_loop().run_until_complete(cell())
"""


@pytest.mark.slow
@pytest.mark.extended
def test_runs_follow_one_another_and_an_interrupted_one_is_resumed(tmp_path: Path) -> None:
    """This works in a process without file and terminal, inside a running event loop, as in a notebook."""
    done = program(NOTEBOOK, json.dumps(SMALL | {"num-clients": 2}), folder=tmp_path)
    hint, *lines = done.stdout.splitlines()
    goes_on, _, command = hint.partition("; ")
    assert re.fullmatch(r"a resumed run goes on after round \d, that of its last checkpoint", goes_on)
    assert [command, *lines] == [
        f"resume with: hyperfl run --resume {tmp_path / 'first'}",
        "8",
        "1",
        "False False",
    ]
    assert len(json.loads((tmp_path / "first" / "manifest.json").read_text())["resumed"]) == 1
    told = done.stderr.splitlines()  # only the resumed run shows its progress
    assert sum(line.startswith("round 8/8: personalized accuracy") for line in told) == 1
    assert not [line for line in told if "1/1" in line]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a finished run of HyperFL on scikit-learn's digits."""
    return trained(small_settings(output=str(tmp_path_factory.mktemp("runs") / "run")))


def test_a_run_reads_its_files(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(finished.parent)
    run = hyperfl.Run("run")
    assert (run.folder, repr(run)) == (finished, f"Run({str(finished)!r})")
    assert run.summary == json.loads((finished / "summary.json").read_text())
    assert run.manifest == json.loads((finished / "manifest.json").read_text())
    assert run.metrics == [json.loads(line) for line in run.metrics_file.read_text().splitlines()]
    assert {line["kind"] for line in run.metrics} == {"train", "aggregate", "client", "client-aggregate"}
    page = run.report(finished.parent / "page.html")
    assert page.read_text().startswith("<!doctype html>")


def test_a_report_that_cannot_be_written_is_an_error_of_this_project(finished: Path, tmp_path: Path) -> None:
    for path, reason in ((tmp_path / "nodir" / "x.html", "No such file or directory"), (tmp_path, "Is a directory")):
        expected = f"^{path} cannot be written: {reason}; choose another output$"
        with pytest.raises(RunDirectoryError, match=expected):
            hyperfl.Run(finished).report(path)


def test_a_run_that_has_not_ended_has_no_summary(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes((finished / "manifest.json").read_bytes())
    run = hyperfl.Run(tmp_path)
    assert run.metrics == []
    with pytest.raises(RunDirectoryError, match=r"holds no summary\.json: the run is not finished; resume it"):
        _ = run.summary
    with pytest.raises(RunDirectoryError, match=r"nowhere does not exist; give the folder of a run"):
        hyperfl.Run(tmp_path / "nowhere")


def test_a_clients_model_and_its_predictions(finished: Path, tmp_path: Path) -> None:
    """An exported model, and the predictions with it, have the accuracy that the run has recorded for the client."""
    run = hyperfl.Run(finished)
    own = run.export(3, tmp_path / "mine" / "model.safetensors")
    aggregate = run.export(3, state="aggregate")
    assert (own.state, aggregate.state) == ("personalized", "aggregate")
    written = load_file(tmp_path / "mine" / "model.safetensors")
    assert {name: values.tolist() for name, values in written.items()} == {
        name: values.tolist() for name, values in own.tensors.items()
    }
    data = load_federated_data(RunConfig.from_flat(small_settings()).data_settings())
    test, chosen = data.dataset.test, data.test_indices(3)
    np.savez(tmp_path / "test.npz", images=test.images[chosen], labels=test.labels[chosen])
    for model in (own, aggregate):
        predicted = run.predict(tmp_path / "test.npz", 3, state=model.state, device="cpu")
        assert predicted.score == pytest.approx(model.score, abs=1e-6)
    named = run.predict(f"npz:{tmp_path / 'test.npz'}", 3, device="cpu")
    assert named.score == pytest.approx(own.score, abs=1e-6)
    with pytest.raises(RunDirectoryError, match="choose another output"):
        run.export(3, tmp_path / "mine" / "model.safetensors")
    with pytest.raises(ConfigError, match="state must be personalized or aggregate, got 'best'"):
        run.export(3, state="best")  # type: ignore[arg-type]


WRONG = {
    "an unknown key": ({"settings": {"num_rounds": 3}}, "num_rounds is unknown; did you mean num-rounds?"),
    "a section": ({"settings": {"data": {"partition": "iid"}}}, "the setting data must be .* a dot in their key"),
    "a list": ({"settings": ["local-epochs=1"]}, "settings must be a dictionary, such as .*; got a list"),
    "another engine": ({"engine": "mars"}, "the engine must be auto, ray or in-process, got mars"),
    "a deployment's nodes": ({"deployment": simulation(), "num_nodes": 2}, "a deployment has its own nodes"),
    "a deployment's cluster": ({"deployment": simulation(), "ray_address": "h:1"}, "a deployment has its own nodes"),
    **{
        f"{nodes!r} nodes": ({"num_nodes": nodes}, f"^num_nodes must be a whole number of at least 1, got {nodes!r};")
        for nodes in (0, 2.5, "2", True)
    },
    "no address": ({"ray_address": "head"}, "must be HOST:PORT"),
    "no run to resume": ({"settings": {"resume": "/nowhere"}}, "/nowhere does not exist"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_run(name: str, in_this_process: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "working"
    folder.mkdir()
    monkeypatch.chdir(folder)
    arguments, message = WRONG[name]
    with pytest.raises(hyperfl.HyperFLError, match=message):
        hyperfl.run(**arguments)
    assert not list(folder.iterdir())


def test_numbers_of_numpy_are_taken(finished: Path, in_this_process: None, tmp_path: Path) -> None:
    """A run takes them as numbers, and a client's id, too."""
    changes: dict[str, Any] = {"learning-rate": np.float32(0.5), "ledger": np.bool_(True)}
    settings = changed_settings(changes, num_clients=np.int64(4))  # type: ignore[arg-type]
    assert [(type(value), value) for value in settings.values()] == [(float, 0.5), (bool, True), (int, 4)]
    with pytest.raises(hyperfl.HyperFLError, match="/nowhere does not exist"):
        hyperfl.resume("/nowhere", num_nodes=np.int64(2))  # type: ignore[arg-type]
    run, file = hyperfl.Run(finished), tmp_path / "one" / "x.safetensors"
    assert run.export(np.int64(1), file).client == 1  # type: ignore[arg-type]
    assert json.loads(file.with_suffix(".json").read_text())["client"] == 1
    with pytest.raises(ConfigError, match=r"client must be a whole number, or None for .*; got 1\.5"):
        run.export(1.5, tmp_path / "two" / "x.safetensors")  # type: ignore[arg-type]
    assert not (tmp_path / "two").exists()


def test_folders_below_the_users_home_are_compared(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(finished.parent))
    repeated(finished, finished.parent / "other")
    assert hyperfl.compare([f"~/{finished.name}", "~/other"])


def test_a_deployment_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a deployment"):
        hyperfl.deployment(tmp_path)


NETWORK = """
from torch import nn


def build(input_shape, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear({inputs}, 8), nn.ReLU(), nn.Linear(8, num_classes))
"""


def test_a_networks_source_is_read_as_it_is_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A source file that is corrected between two calls in one process is read again."""
    monkeypatch.chdir(tmp_path)
    changes = {**TINY, "target": "corrected_network:build", "output": str(tmp_path / "run")}
    source = tmp_path / "corrected_network.py"
    source.write_text(NETWORK.format(inputs=63))
    with pytest.raises(ConfigError, match="corrected_network:build"):
        simulation(1, "in-process")(changes).__enter__()
    source.write_text(NETWORK.format(inputs=64))
    with simulation(1, "in-process")(changes) as ready:
        assert ready.plan.sources == [source]
    assert "corrected_network" not in sys.modules


BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL) if PAGE.is_file() else []


@pytest.mark.skipif(not PAGE.is_file(), reason="needs a checkout of the project")
def test_the_page_s_example_runs(
    in_this_process: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = [block for block in BLOCKS if "pandas" not in block or importlib.util.find_spec("pandas")]
    exec("\n".join(blocks), {})
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    folder = Path(lines[0])
    assert folder.parent == tmp_path / "runs"
    assert "client 3's model of hyperfl, after its local training in round 2" in printed.out
    assert (tmp_path / "mine" / "use_model.py").is_file()
    assert any(line.startswith("3 of 3 rounds, mean accuracy 0.") for line in lines)
    assert any(line.startswith("hyperfl: ") and "training alone" in line for line in lines)
    assert lines[-1].endswith("did you mean hyperfl?")
    assert "round 2/2: personalized accuracy" in printed.err
    assert hyperfl.Run(folder).summary["rounds"] == 3


@pytest.mark.slow
@pytest.mark.skipif(not PAGE.is_file(), reason="needs a checkout of the project")
def test_the_pages_example_has_types(tmp_path: Path) -> None:
    """The page's example passes mypy's strict mode, which reports the three wrong lines that the test adds."""
    wrong = 'hyperfl.rum()\nhyperfl.run(num_rounds="2")\nhyperfl.run(engine="mars")\nreveal_type(hyperfl.run())'
    example = tmp_path / "example.py"
    example.write_text("\n".join([*(block for block in BLOCKS if "pandas" not in block), wrong]))
    # The packages that are not asked about here are not read, which takes a fifth of the time.
    packages = ["torch.*", "numpy.*", "flwr.*", "pydantic.*", "matplotlib.*", "ray.*"]
    settings = tmp_path / "mypy.ini"
    settings.write_text(
        f"[mypy]\nstrict = true\ncache_dir = {tmp_path}\n[mypy-{','.join(packages)}]\nfollow_imports = skip\n"
    )
    command = [sys.executable, "-m", "mypy", "--config-file", str(settings), str(example)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    kinds = re.findall(r"example\.py:\d+: \w+: .*?(?:\[([\w-]+)\]|(Revealed type is .*))$", done.stdout, re.MULTILINE)
    assert [kind for kind, _ in kinds] == ["attr-defined", "arg-type", "arg-type", ""], done.stdout
    assert kinds[-1][1] == 'Revealed type is "hyperfl_flwr.api.run.Run"'
