"""What is handed to Flower tells where it is from."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hyperfl_flwr.core import versions
from hyperfl_flwr.launch import app_bundle
from hyperfl_flwr.runs import manifest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
PROGRAM = "import json; from hyperfl_flwr.runs.manifest import code; print(json.dumps(code()))"


@pytest.mark.parametrize(
    ("told", "expected"), [(COMMIT, (COMMIT, False)), (f"{COMMIT}-dirty", (COMMIT, True)), ("", (None, None))]
)
def test_an_app_tells_the_commit_that_it_was_copied_from(
    told: str, expected: tuple[str | None, bool | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that runs in the copy, as Flower's do, writes it into the manifest."""
    monkeypatch.setattr(app_bundle, "commit", lambda: told)
    monkeypatch.delenv(versions.COMMIT_VARIABLE, raising=False)
    app = app_bundle.build_app(tmp_path / "app")
    out = subprocess.run([sys.executable, "-c", PROGRAM], cwd=app, capture_output=True, text=True, check=True).stdout
    code = json.loads(out)
    assert (code["commit"], code["dirty"], code["app"]) == (*expected, str(app))


def test_the_processes_of_a_study_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(versions.COMMIT_VARIABLE, f"{COMMIT}-dirty")
    assert (manifest.code()["commit"], manifest.code()["dirty"]) == (COMMIT, True)
