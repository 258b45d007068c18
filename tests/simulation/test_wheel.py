"""The wheel contains the whole app: `hyperfl run` works from it in an empty folder, and refuses foreign packages."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from hyperfl_flwr import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder in which only the project's wheel is installed."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = [*pip, "wheel", str(ROOT), "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "hyperfl_flwr/pyproject.toml" in names
    assert "hyperfl_flwr/LICENSE" in names
    assert "hyperfl_flwr/py.typed" in names
    assert {"experiments/studies/table-1.toml", "experiments/expected/table-1.csv"} <= set(names)
    assert {"hyperfl_flwr/pages/templates/base.html", "hyperfl_flwr/pages/templates/page.css"} <= set(names)
    templates = {path.name for path in (ROOT / "hyperfl_flwr" / "deploy" / "templates").iterdir()}
    assert templates == {Path(name).name for name in names if name.startswith("hyperfl_flwr/deploy/templates/")}
    assert not [name for name in names if name.startswith(("tests", "docs", "benchmarks"))]
    install = [*pip, "install", "--no-deps", "--no-index", "--target", str(folder / "site"), str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    return folder / "site"


def hyperfl(site: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-m", "hyperfl_flwr", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.extended
def test_run_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    sets = ["--set", "hyperfl.hidden-width=8", "--set", "hyperfl.embedding-dim=4"]
    sizes = ["--num-clients", "2", "--num-rounds", "1", "--engine", "in-process"]
    done = hyperfl(installed, tmp_path, "run", *sizes, *sets)
    assert done.returncode == 0, done.stderr
    output = Path(done.stdout.splitlines()[-1])
    assert output.parent == tmp_path / "runs"
    assert (output / "summary.json").is_file()
    page = hyperfl(installed, tmp_path, "report", str(output))
    assert (page.returncode, page.stdout) == (0, f"{output / 'report.html'}\n"), page.stderr


def test_a_foreign_package_is_refused(installed: Path, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    (foreign / "strategies").mkdir(parents=True)
    (foreign / "strategies" / "__init__.py").write_text("")
    done = hyperfl(Path(f"{foreign}{os.pathsep}{installed}"), tmp_path, "run")
    assert done.returncode == 2, done.stderr
    assert f"would be imported from {foreign / 'strategies'}" in done.stderr
    assert not (tmp_path / "runs").exists()
