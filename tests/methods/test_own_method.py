"""A method of the user's own, `package.module:METHOD`, is trained, kept, resumed and reported as built-in ones are."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import own_method
import pytest
from federations import Call, repeated

from hyperfl_flwr.app.client import app
from hyperfl_flwr.app.methods import client_of, strategy_of
from hyperfl_flwr.app.resolved import resolved
from hyperfl_flwr.app.server import run as serve
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.config.table import default_settings, resumable_changes, training_autos, with_defaults
from hyperfl_flwr.contract.base import Federate
from hyperfl_flwr.contract.folders import outcome
from hyperfl_flwr.contract.grids import Settings
from hyperfl_flwr.core.errors import ConfigError, RunDirectoryError, RunFailedError, StateError
from hyperfl_flwr.core.packages.source_files import digest_of
from hyperfl_flwr.core.packages.user_code import UserCode
from hyperfl_flwr.deploy.ledger_view import runs_of
from hyperfl_flwr.launch.app_bundle import build_app
from hyperfl_flwr.methods import METHODS, method_sections
from hyperfl_flwr.models.provenance import refuse_changed_sources, travelling_sources
from hyperfl_flwr.results.compare import compare
from hyperfl_flwr.results.export import model_of_run
from hyperfl_flwr.results.join import shared_of, write_shared
from hyperfl_flwr.results.join_server import joins_with_server
from hyperfl_flwr.results.report import write_report
from hyperfl_flwr.runs.run_directory import read_manifest, settings_of
from hyperfl_flwr.runs.run_sources import method_of
from hyperfl_flwr.server.federation import handshake
from hyperfl_flwr.server.handshake import KINDS
from hyperfl_flwr.server.in_process_grid import InProcessGrid

pytestmark = pytest.mark.usefixtures("imports_as_before")

CLIPPED = "own_method:CLIPPED"
SOURCE = Path(own_method.__file__)


def test_the_table_of_methods_has_it_but_does_not_list_it() -> None:
    assert METHODS[CLIPPED] is own_method.CLIPPED
    assert CLIPPED in METHODS
    assert CLIPPED not in list(METHODS)
    assert "nowhere_at_all:METHOD" in METHODS  # nothing is imported to answer
    assert "clipped" not in METHODS
    assert len(METHODS) == len(METHODS.built_in) == len(list(METHODS))
    with pytest.raises(KeyError):
        METHODS["clipped"]
    assert client_of(CLIPPED) is own_method.ClippedClient
    assert strategy_of(CLIPPED) is own_method.ClippedStrategy


def test_its_settings_are_in_its_runs_only() -> None:
    assert set(default_settings(CLIPPED)) - set(default_settings()) == {
        "clipped.norm", "clipped.server-share", "clipped.note",
    }  # fmt: skip
    assert default_settings("fedavg") == default_settings()
    assert list(method_sections(CLIPPED))[-1] is own_method.ClippedConfig
    assert training_autos(CLIPPED) - training_autos() == {"clipped.server-share"}
    assert resumable_changes(CLIPPED) - resumable_changes() == {"clipped.note"}
    config = RunConfig.from_flat(with_defaults({"method": CLIPPED, "clipped.norm": 4.0}))
    assert RunConfig.from_flat(config.flat()) == config
    assert resolved(config).flat()["clipped.server-share"] == 0.25
    with pytest.raises(ConfigError, match=r"clipped.norm must be greater than 0"):
        RunConfig.from_flat(with_defaults({"method": CLIPPED, "clipped.norm": -1.0}))
    with pytest.raises(ConfigError, match=r"clipped.norms is unknown; did you mean clipped.norm\?"):
        RunConfig.from_flat(with_defaults({"method": CLIPPED, "clipped.norms": 1.0}))
    with pytest.raises(ConfigError, match=r"clipped.norm is unknown"):
        RunConfig.from_flat(with_defaults({"method": "fedavg", "clipped.norm": 1.0}))


BAD = {
    "NOT_A_METHOD": r"NOT_A_METHOD must be a hyperfl_flwr.core.method.Method, got dict",
    "MISSING": r"MISSING in module mine does not exist",
    "NO_CLIENT": r"own_method:NoClient must be a clients.engine.base.BaseClient, got None",
    "NO_MODULE": r"own_method_parts cannot be imported: ModuleNotFoundError",
    "NO_PATH": r"'strategies.fedavg' must be package.module:name",
    "WRONG_CLASS": r"must be a clients.engine.base.BaseClient, got <class",
    "NO_RATE": r"learning_rate must be a number above 0, got 0.0",
    "TAKEN_KEY": r"the key fedprox of OtherFedProx is that of a built-in method's settings",
    "SHADOWING_KEY": r"must not have the key seed, which is taken; choose another key",
    "FORGED_KEY": r"the key of Keyed must be lower-case letters, digits and hyphens",
    "UNDECLARED": r"Undeclared declares norm without `setting\(default, meaning\)`",
    "LISTED": r"the default of listed.norms must be a finite number, a text or a truth value",
    "NOT_FINITE": r"the default of nan.rate must be a finite number, a text or a truth value, got nan",
    "UMLAUT": r"the name of umlaut.größe must be ASCII letters",
    "TWICE": r"two of its sections have the key clipped",
    "NO_TUPLE": r"settings must be a tuple of subclasses of hyperfl_flwr.core.settings.Section",
    "NO_CLIENT_PATH": r"client must be a text, got 5",
    "NO_UPLOADS": r"uploads must be a tuple of Upload, got \('model',\)",
    "NO_PART": r"part of an Upload must be one of model, .*, got 'modell'; did you mean model\?",
    "NO_FORM": r"form of an Upload must be one of values, increase, decrease, gradient, got 5",
    "NO_FUNCTION": r"weight_epsilon must be None or a function of the settings, got 5",
}


@pytest.mark.parametrize("name", BAD)
def test_a_wrong_declaration_is_refused_with_the_reason(name: str, call: Call) -> None:
    """By the command line, before anything starts, with the setting's name and without a traceback."""
    shutil.copy(SOURCE, "mine.py")
    text = Path("mine.py").read_text().replace("own_method:", "mine:")
    Path("mine.py").write_text(text)
    code, out, err = call("run", "--method", f"mine:{name}")
    assert (code, out) == (2, "")
    assert re.search(BAD[name].replace("own_method:", "mine:").replace(" ", r"\s+"), err), err
    assert name == "SHADOWING_KEY" or f"error: method = mine:{name}: " in err
    assert "Traceback" not in err
    assert not Path("runs").exists()


def test_settings_that_no_run_takes_are_not_listed(call: Call) -> None:
    Path("mine.py").write_text(SOURCE.read_text().replace("own_method:", "mine:"))
    code, out, err = call("settings", "mine:SHADOWING_KEY")
    assert (code, out) == (2, "")
    assert "must not have the key seed, which is taken; choose another key" in " ".join(err.split())


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("os:system", "os is Python's; give your own package or module another name"),
        ("clients.fedavg:FedAvgClient", "clients is this project's"),
        ("nowhere_at_all:METHOD", "no module nowhere_at_all is in the working directory or installed"),
        ("mine.py", "got the file 'mine.py'; for a declaration METHOD in it write mine:METHOD, in the file's folder"),
        ("mine", "; got 'mine'; for a method of your own write mine:METHOD (without .py)"),
        ("fedavgg", "or a method of yours as package.module:METHOD; got 'fedavgg'; did you mean fedavg?"),
        ("mine.py:RULE", "no module mine is in the working directory or installed; for a method of your own write"),
        ("./mine.py:RULE", "; got './mine.py:RULE'; for a method of your own write mine:RULE (without .py)"),
    ],
)
def test_names_that_cannot_be_methods(name: str, problem: str, call: Call) -> None:
    code, _, err = call("run", "--method", name)
    assert code == 2
    assert problem in " ".join(err.split())


def test_a_run_keeps_the_source_and_is_resumed_with_it_only(federate: Federate) -> None:
    run = federate(CLIPPED, **{"clipped.norm": 0.5})
    manifest = read_manifest(run)
    assert manifest["settings"]["method"] == CLIPPED
    assert manifest["resolved"]["clipped.server-share"] == 2.0
    assert manifest["method"] == {
        "name": CLIPPED, "sha256": UserCode("method", CLIPPED).sha256, "installed": False,
    }  # fmt: skip
    assert (run / "method" / "own_method.py").read_bytes() == SOURCE.read_bytes()
    assert json.loads((run / "summary.json").read_text())["method"] == CLIPPED
    assert settings_of(run)["clipped.server-share"] == 2.0
    assert settings_of(run)["clipped.norm"] == 0.5
    refuse_changed_sources(manifest, manifest["settings"])
    with pytest.raises(RunDirectoryError, match=r"must use the method that it started with, but the source .* changed"):
        refuse_changed_sources(manifest | {"method": {"sha256": "0"}}, manifest["settings"])
    assert "method" not in read_manifest(federate("fedavg"))


def test_another_name_for_a_built_in_method_gives_its_bits(federate: Federate) -> None:
    own, built_in = outcome(federate("own_method:PRIVATE_HEAD")), outcome(federate("fedrep"))
    assert own["private"] == built_in["private"] != {}
    assert own["arrays"] == built_in["arrays"]


def test_a_run_is_continued(make_settings: Callable[..., Settings], federate: Federate, tmp_path: Path) -> None:
    """From the working directory's source; an `auto` of its own section is not asked for again."""
    straight = federate(CLIPPED, num_rounds=3)
    settings = make_settings(method=CLIPPED, num_rounds=2, output=str(tmp_path / "run"))
    serve(InProcessGrid(app, 1, settings, {"simulated": True}), RunConfig.from_flat(settings))
    more: Settings = {**settings, "output": "", "resume": str(tmp_path / "run"), "num-rounds": 3, "clipped.note": "b"}
    serve(InProcessGrid(app, 1, more, {"simulated": True}), RunConfig.from_flat(more))
    assert outcome(tmp_path / "run")["arrays"] == outcome(straight)["arrays"]
    other = {**more, "num-rounds": 4, "clipped.norm": 2.0}
    with pytest.raises(RunDirectoryError, match=r"clipped.norm was 1.0, now 2.0"):
        serve(InProcessGrid(app, 1, other, {"simulated": True}), RunConfig.from_flat(other))


def test_a_node_with_another_source_is_refused(federate: Federate, monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = iter(["same", "other", "same"])  # two nodes answer the handshake, then the server compares
    monkeypatch.setattr("hyperfl_flwr.app.node.method_hash", lambda _: next(hashes))
    monkeypatch.setattr("hyperfl_flwr.server.federation.method_hash", lambda _: next(hashes))
    with pytest.raises(RunFailedError, match=r"the nodes \[1\] have another source of own_method:CLIPPED"):
        federate(CLIPPED)


def test_the_kind_of_each_property_of_the_handshake_is_checked(make_settings: Callable[..., Settings]) -> None:
    """What a node reports is untrusted."""
    settings = make_settings(CLIPPED, target="own_networks:build")
    federation = handshake(InProcessGrid(app, 2, settings, {"simulated": True}), 5, 10.0)
    reported = {key for node in federation.nodes for key in node.properties}
    assert {"method", "model"} <= reported
    assert reported - set(KINDS) == {"partition"}  # which is read before


def test_the_app_includes_source_and_settings_and_flower_builds_it(tmp_path: Path) -> None:
    """Also where network and method are in one package, and with a value that TOML must quote."""
    settings = with_defaults({"method": CLIPPED, "target": "own_networks:build"})
    app_folder = build_app(tmp_path / "app", travelling_sources(settings), settings)
    table = tomllib.loads((app_folder / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    assert table["config"]["clipped"] == {"norm": 1.0, "server-share": "auto", "note": 'a "quoted" text'}
    assert table["fab-include"][-2:] == ["own_networks.py", "own_method.py"]
    flwr = Path(sys.executable).with_name("flwr")
    subprocess.run([flwr, "build", "--app", app_folder], cwd=tmp_path, check=True, capture_output=True)
    assert len(travelling_sources({"method": CLIPPED, "target": "own_method:build"})) == 1
    plain = build_app(tmp_path / "plain", (), with_defaults({"method": "fedavg"}))
    assert "clipped" not in (plain / "pyproject.toml").read_text()


def test_the_command_line_runs_it_from_the_working_directory(call: Call) -> None:
    Path("mine.py").write_text(SOURCE.read_text().replace("own_method:", "mine:"))
    code, out, err = call("settings", "mine:CLIPPED")
    assert code == 0, err
    assert "clipped.norm = 1.0" in out
    assert "Share of the way to the mean." in out
    assert "data.partition" not in out
    assert "has no settings of its own" in call("settings", "mine:PRIVATE_HEAD")[1]
    words = ("--method", "mine:CLIPPED", "--num-clients", 2, "--num-rounds", 1, "--engine", "in-process")
    code, out, err = call("run", *words, "--set", "clipped.norm=0.5", "--set", "fedprox.mu=1.0", "--output", "run")
    assert code == 0, err
    assert "fedprox.mu has no effect on mine:CLIPPED" in " ".join(err.split())
    assert (Path("run") / "method" / "mine.py").is_file()
    code, out, err = call("report", "run")
    assert code == 0, err
    assert "federated averaging with clipped gradients" in (Path("run") / "report.html").read_text()
    Path("mine.py").write_text(Path("mine.py").read_text() + "\n# changed\n")
    code, _, err = call("run", "--resume", "run", "--set", "num-rounds=2")
    assert code == 2
    expected = "the source of mine:CLIPPED has changed; start a new run with the changed source, undo the change, or"
    assert expected in " ".join(err.split())
    Path("mine.py").unlink()
    code, out, err = call("report", "run")
    assert code == 0, err
    code, _, err = call("run", "--resume", "run", "--set", "num-rounds=2", "--engine", "in-process")
    assert code == 0, err  # with the copy in the run's folder


@pytest.mark.extended
def test_an_attack_and_a_sweep_take_it(call: Call) -> None:
    Path("mine.py").write_text(SOURCE.read_text().replace("own_method:", "mine:"))
    words = ("--method", "mine:CLIPPED", "--num-images", 1, "--iterations", 2, "--attacks", "head-gradient")
    code, out, err = call("audit", *words, "--set", "batch-size=1", "--set", "local-epochs=1", "--output", "audit")
    assert code == 0, err
    words = ("--methods", "mine:CLIPPED,fedavg", "--num-rounds", 1, "--set", "num-clients=2")
    code, out, err = call("sweep", *words, "--set", "clipped.norm=0.5", "--output", "sweep")
    assert code == 0, err
    assert "mine:CLIPPED" in out
    runs = {name: Path("sweep") / name / "digits" / "seed-0" for name in ("mine.CLIPPED", "fedavg")}
    assert settings_of(runs["mine.CLIPPED"])["clipped.norm"] == 0.5
    assert "clipped.norm" not in settings_of(runs["fedavg"])
    code, _, err = call("sweep", *words, "--set", "clipped.norms=0.5", "--output", "other")
    assert code == 2
    assert "clipped.norms is unknown; did you mean clipped.norm?" in " ".join(err.split())


def version(run: Path, text: str) -> None:
    """Let a run be one of another version of the source."""
    (run / "method" / "own_method.py").write_text(SOURCE.read_text() + text)
    document = read_manifest(run)
    document["method"]["sha256"] = digest_of(run / "method" / "own_method.py")
    (run / "manifest.json").write_text(json.dumps(document))


def test_runs_of_other_versions_are_no_seeds_of_one_group(federate: Federate) -> None:
    """Reports and comparisons read the method of each run from its own folder."""
    first = federate("own_method:PRIVATE_HEAD")
    other = repeated(first, first.with_name("other"))
    version(other, "\n# another version\n")
    found = compare([first, other])
    assert [group.label for group in found.groups] == [
        f"own_method:PRIVATE_HEAD, method source={read_manifest(run)['method']['sha256'][:8]}" for run in (first, other)
    ]
    assert "method source" not in compare([first, federate("fedavg")]).differing
    assert write_report(other).is_file()


READERS = (write_report, method_of, lambda run: model_of_run(run, 0))


def test_runs_of_unknown_methods_are_refused(federate: Federate) -> None:
    run = federate(CLIPPED)
    assert method_of(run) == CLIPPED
    model_of_run(run, 0)
    version(run, "\n1 / 0")
    for read in READERS:
        with pytest.raises(RunDirectoryError, match=r"the code of .* is needed: .* cannot be imported: ZeroDivision"):
            read(run)
    document = read_manifest(run)
    document["settings"]["method"] = "newer"
    (run / "manifest.json").write_text(json.dumps(document))
    with pytest.raises(RunDirectoryError, match="is a run of 'newer', which this version"):
        write_report(run)


def test_only_the_source_of_the_training_is_imported(federate: Federate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a copy that was changed nor another version of the working directory; an equal one there is."""
    run = federate(CLIPPED)
    shutil.copy(SOURCE, run)
    (run / "edited").mkdir()
    (run / "edited" / "own_method.py").write_text("raise SystemExit('imported')")
    (run / "method" / "own_method.py").write_text("raise SystemExit('imported')")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(SOURCE.parent)])
    sys.modules.pop("own_method")
    monkeypatch.chdir(run / "edited")
    for read in READERS:
        with pytest.raises(RunDirectoryError, match=r"method does not hold the source that the run was trained with"):
            read(run)
    monkeypatch.chdir(run)
    assert method_of(run) == CLIPPED
    document = read_manifest(run)
    del document["method"]
    (run / "manifest.json").write_text(json.dumps(document))
    with pytest.raises(RunDirectoryError, match=r"does not hold the source"):
        method_of(run)


def test_another_method_is_no_continuation(federate: Federate, call: Call) -> None:
    run = federate(CLIPPED)
    for name in ("fedavg", "nowhere_at_all:METHOD"):
        code, _, err = call("run", "--resume", run, "--method", name)
        assert code == 2
        assert f"a resumed run must keep its method, {CLIPPED}, got {name}" in " ".join(err.split())


def test_a_class_in_a_module_that_does_not_travel_is_refused(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path.cwd())
    Path("mine_parts.py").write_text("from clients.fedavg import FedAvgClient as Client")
    text = SOURCE.read_text().replace("own_method_parts:", "mine_parts:")
    Path("mine.py").write_text(text.replace("own_method:", "mine:"))
    code, _, err = call("run", "--method", "mine:NO_MODULE")
    assert code == 2
    shown = " ".join(err.split())
    assert re.search(
        r"mine_parts:Client is in .*mine_parts.py, but the app contains mine only; move it into mine", shown
    )


def test_a_study_does_not_mix_versions(call: Call) -> None:
    """A sweep that is continued after a change of the source is refused."""
    Path("mine.py").write_text(SOURCE.read_text().replace("own_method:", "mine:"))
    words = ("--methods", "mine:CLIPPED", "--num-rounds", 1, "--set", "num-clients=2", "--output", "sweep")
    code, _, err = call("sweep", *words, "--seeds", 1)
    assert code == 0, err
    Path("mine.py").write_text(Path("mine.py").read_text() + "\n# changed\n")
    code, _, err = call("sweep", *words, "--seeds", 2)
    assert code == 2
    assert re.search(r"was run with other settings \(source \w{12} of mine:CLIPPED instead of", " ".join(err.split()))


def test_a_file_of_strangers_chooses_no_code(federate: Federate, tmp_path: Path) -> None:
    """`hyperfl export --shared` and files that it has not written."""
    run = federate("own_method:PRIVATE_HEAD")
    assert not joins_with_server(run)
    shared = shared_of(run)
    with pytest.raises(RunDirectoryError, match="the file would lack the code of own_method:PRIVATE_HEAD"):
        write_shared(shared, tmp_path / "shared.safetensors")
    built_in = shared_of(federate("fedrep"))
    write_shared(built_in, tmp_path / "other.safetensors")
    content = (tmp_path / "other.safetensors").read_bytes()
    name = b'\\"method\\": \\"fedrep\\"'
    assert name in content
    forged = content.replace(name, b'\\"method\\":\\"tricky:M\\"'[: len(name)].ljust(len(name)))
    (tmp_path / "forged.safetensors").write_bytes(forged)
    (tmp_path / "tricky.py").write_text("raise RuntimeError")
    with pytest.raises(StateError, match="is damaged or not a file of"):
        shared_of(tmp_path / "forged.safetensors")


def test_the_ledger_names_its_private_groups_without_its_code(federate: Federate, call: Call) -> None:
    run = federate("own_method:PRIVATE_HEAD", ledger=True)
    sys.modules.pop("own_method")
    (found,), damaged = runs_of(run)
    assert damaged == []
    assert found.private == ("classifier",)
    assert found.knows_private
    assert found.leaked == []
    file = run / "clients" / "ledger.jsonl"
    file.write_text(file.read_text().replace('"private": ["classifier"]', '"private": null'))
    code, out, err = call("ledger", run)
    assert code == 0, err
    assert "The ledger does not say which groups of own_method:PRIVATE_HEAD are private." in " ".join(out.split())
    assert "own_method" not in sys.modules


def test_code_that_leaves_python_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine_leaving.py").write_text("import sys\nsys.exit(0)\n")
    code = UserCode("method", "mine_leaving:METHOD")
    code.find_new()
    with pytest.raises(ConfigError, match=r"cannot be imported: SystemExit: 0 \(.*mine_leaving.py, line 2\)"):
        METHODS["mine_leaving:METHOD"]


@pytest.mark.parametrize("call", ["json.loads('{')", "numpy.linalg.inv(1)"])
def test_an_error_inside_a_library_is_placed_where_the_users_code_calls_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine_calling.py").write_text(f"import json\nimport numpy\n\n{call}\n")
    UserCode("method", "mine_calling:METHOD").find_new()
    with pytest.raises(ConfigError, match=r"Error: .* \(.*mine_calling.py, line 4\)"):
        METHODS["mine_calling:METHOD"]
