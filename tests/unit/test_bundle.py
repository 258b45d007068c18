"""The app that is handed to Flower: its recorded commit, and the files that are sent to the owners of data."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from hyperfl_flwr.core.packages import versions
from hyperfl_flwr.core.packages.code_version import code_digest, code_entry
from hyperfl_flwr.launch import app_bundle

COMMIT = "0123456789abcdef0123456789abcdef01234567"
PROGRAM = "import json; from hyperfl_flwr.core.packages.code_version import code_entry; print(json.dumps(code_entry()))"


@pytest.mark.parametrize(
    ("told", "expected"), [(COMMIT, (COMMIT, False)), (f"{COMMIT}-dirty", (COMMIT, True)), ("", (None, None))]
)
def test_an_app_tells_the_commit_that_it_was_copied_from(
    told: str, expected: tuple[str | None, bool | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that runs in the copy, as Flower's processes do, finds the commit for its manifest."""
    monkeypatch.setattr(app_bundle, "commit", lambda: told)
    monkeypatch.delenv(versions.COMMIT_VARIABLE, raising=False)
    app = app_bundle.build_app(tmp_path / "app")
    out = subprocess.run([sys.executable, "-c", PROGRAM], cwd=app, capture_output=True, text=True, check=True).stdout
    code = json.loads(out)
    assert (code["commit"], code["dirty"], code["app"]) == (*expected, str(app))
    # The bundle lacks some of the files, but is the version that it was made from.
    assert code.get("sha256") == (None if told == COMMIT else code_digest())


def test_the_processes_of_a_study_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(versions.COMMIT_VARIABLE, f"{COMMIT}-dirty")
    assert (code_entry()["commit"], code_entry()["dirty"]) == (COMMIT, True)


def test_no_attack_and_no_command_line_travels_to_a_node(tmp_path: Path) -> None:
    """The bundle made by `flwr build` has the needed folders only, and all of its modules import without the rest."""
    flwr = Path(sys.executable).with_name("flwr")
    app = app_bundle.build_app(tmp_path / "app")
    subprocess.run([flwr, "build", "--app", app], cwd=tmp_path, check=True, capture_output=True)
    (fab,) = tmp_path.glob("*.fab")
    with zipfile.ZipFile(fab) as bundle:
        names = bundle.namelist()
        bundle.extractall(tmp_path / "node")
    folders = {name.split("/")[1] for name in names if name.startswith("hyperfl_flwr/") and name.count("/") > 1}
    assert folders == {
        "app", "config", "core", "data", "flower", "methods", "metrics", "models", "node", "privacy", "protocol",
        "runs", "server", "training",
    }  # fmt: skip
    assert not [name for name in names if name.startswith("hyperfl_flwr/flower/superlink/")]
    assert not [
        name for name in names if name.startswith("experiments") or "attack" in name or "cli" in Path(name).parts
    ]
    program = """
import importlib, pathlib, sys
for path in sorted(pathlib.Path().rglob("*.py")):
    if path.stem != "guard_all":  # of the packages that do not travel
        importlib.import_module(".".join(path.with_suffix("").parts).removesuffix(".__init__"))
ours = {"hyperfl_flwr", "strategies", "clients", "experiments"}
files = [module.__file__ for name, module in sys.modules.items() if name.split(".")[0] in ours]
print({file for file in files if not file.startswith(sys.argv[1])})
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "node")], cwd=tmp_path / "node", capture_output=True, text=True,
        check=False, env={**os.environ, "PYTHONPATH": str(tmp_path / "node")},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "set()\n"), done.stderr
