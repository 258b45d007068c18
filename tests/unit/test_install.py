"""The installation: `make` runs for real, with a copy of the Makefile, a tiny project and local wheels."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from waiting import eventually

ROOT = Path(__file__).resolve().parents[2]
PYTHON = os.path.realpath(sys.executable)
VERSION = "{}.{}".format(*sys.version_info[:2])

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (ROOT / "constraints.txt").is_file(), reason="needs a checkout of the project"),
]

BACKEND = """
import shutil, pathlib, time

def build_editable(folder, config_settings=None, metadata_directory=None):
    with open("builds", "a") as builds:
        builds.write("built\\n")
    while pathlib.Path("wait").exists():
        time.sleep(0.01)
    return shutil.copy("tiny-1.0-py3-none-any.whl", folder).rpartition("/")[2]
"""
"""Build backend of the tiny project: it records each build, and waits while there is a file `wait`."""

PYPROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]

[project]
name = "tiny"
version = "1.0"
"""

INTERRUPTION = """import os, sys; sys.addaudithook(lambda event, args: event == "open" and args[2] & os.O_CREAT \
and "MOMENT" in str(args[0]) and os.killpg(0, SIGNAL))
"""
"""Line of a .pth file that sends a signal to make and all of its processes when Python creates a certain file."""

LIST = """
import importlib
from importlib.metadata import distributions
for found in distributions():
    if found.name not in ("pip", "setuptools"):
        assert importlib.import_module(found.name).version == found.version
        assert importlib.import_module(f"{found.name}.last").main
        print(found.name, found.version)
"""


def write_wheel(folder: Path, name: str, version: str, requires: tuple[str, ...] = (), entry_points: str = "") -> None:
    """Write a wheel of a package with two modules."""
    record = f"{name}-{version}.dist-info"
    lines = [f"Requires-Dist: {line}\n" for line in requires]
    files = {
        f"{name}/__init__.py": f"version = '{version}'\n",
        f"{name}/last.py": "def main() -> None:\n    print('it runs')\n",
        f"{record}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nProvides-Extra: dev\n"
        + "".join(lines),
        f"{record}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{record}/entry_points.txt": entry_points,
    }
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)
        wheel.writestr(f"{record}/RECORD", "".join(f"{path},,\n" for path in [*files, f"{record}/RECORD"]))


class Project:
    """A folder with the Makefile and everything that an installation into it needs."""

    def __init__(self, folder: Path) -> None:
        self.started: list[subprocess.Popen[str]] = []
        self.folder = folder / "a project"
        self.bin = folder / "bin"
        self.own = folder / "own"
        links = folder / "links"
        for path in (self.folder, self.bin, self.own, links, folder / "home"):
            path.mkdir()
        (self.bin / "python3").symlink_to(PYTHON)
        (self.folder / "Makefile").write_bytes((ROOT / "Makefile").read_bytes())
        (self.folder / "backend.py").write_text(BACKEND)
        (self.folder / "pyproject.toml").write_text(PYPROJECT)
        self.pin(dep="1.0", tool="1.0", torch="2.15.0", torchvision="0.29.2")
        needs = ("dep", "torch>=2.4", "torchvision", "tool; extra == 'dev'")
        write_wheel(self.folder, "tiny", "1.0", needs, "[console_scripts]\nhyperfl = tiny.last:main\n")
        for version in ("1.0", "2.0"):
            write_wheel(links, "dep", version, (), "[console_scripts]\ndep = dep.last:main\n")
        write_wheel(links, "tool", "1.0")
        for version, torchvision in (("2.9.1", "0.24.1"), ("2.15.0", "0.29.2"), ("2.16.0", "0.30.0")):
            write_wheel(links, "torch", version)
            write_wheel(links, "torchvision", torchvision, (f"torch=={version}",))
        for version in ("2.3.0+cpu", "2.9.1+cpu", "2.15.0+cpu", "2.9.1"):
            write_wheel(self.own, "torch", version)
        write_wheel(self.own, "torchvision", "0.24.1+cpu", ("torch==2.9.1",))
        self.environment = {
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "HOME": str(folder / "home"),
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(links),
        }

    @property
    def venv(self) -> Path:
        return self.folder / ".venv"

    @property
    def packages(self) -> Path:
        return self.venv / "lib" / f"python{VERSION}" / "site-packages"

    @property
    def builds(self) -> int:
        """Number of times that pip has built the project, which it does at every installation."""
        path = self.folder / "builds"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def pin(self, **pins: str) -> None:
        lines = [f"{name}=={version}\n" for name, version in pins.items()]
        (self.folder / "constraints.txt").write_text("# known to work\n" + "".join(lines))

    def start(self, *words: str, **environment: str) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            ["make", *words], cwd=self.folder, env=self.environment | environment, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        self.started.append(process)
        return process

    def make(self, *words: str, **environment: str) -> str:
        """Run make, which must succeed, and return its output."""
        return self._make(words, environment, succeeds=True)

    def fail(self, *words: str, **environment: str) -> str:
        """Run make, which must fail, and return its output."""
        return self._make(words, environment, succeeds=False)

    def _make(self, words: tuple[str, ...], environment: dict[str, str], *, succeeds: bool) -> str:
        process = self.start(*words, **environment)
        output, _ = process.communicate()
        assert (process.returncode == 0) is succeeds, output
        return output

    def install_own(self, *names: str) -> None:
        """Install wheels of another source into the environment, as a user would."""
        wheels = [self.own / f"{name}-py3-none-any.whl" for name in names]
        command = [self.venv / "bin" / "python", "-m", "pip", "install", *wheels]
        subprocess.run(command, env=self.environment, capture_output=True, check=True)

    def installed(self) -> dict[str, str]:
        """Check that the installed packages are complete, and return their versions by name."""
        for name in ("hyperfl", "dep"):
            run = subprocess.run([self.venv / "bin" / name], capture_output=True, text=True, check=True)
            assert run.stdout == "it runs\n"
        run = subprocess.run([self.venv / "bin" / "python", "-Ic", LIST], capture_output=True, text=True, check=True)
        assert list(self.packages.glob("~*")) == []
        return dict(line.split() for line in run.stdout.splitlines())


ALL = {"tiny": "1.0", "dep": "1.0", "torch": "2.15.0", "torchvision": "0.29.2"}


@pytest.fixture
def bare(tmp_path: Path) -> Iterator[Project]:
    project = Project(tmp_path)
    yield project
    for process in project.started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("environment") / ".venv"
    subprocess.run([PYTHON, "-m", "venv", path], check=True)
    return path


@pytest.fixture
def project(bare: Project, environment: Path) -> Project:
    """Return a project with an environment that the user has made."""
    shutil.copytree(environment, bare.venv, symlinks=True)
    return bare


def make_environment(path: Path, hook: str) -> Path:
    """Make an environment in which Python runs a line at its start; return the file with that line."""
    subprocess.run([PYTHON, "-m", "venv", "--without-pip", path], check=True)
    return add_hook(path / "lib" / f"python{VERSION}" / "site-packages", hook)


def add_hook(packages: Path, hook: str) -> Path:
    (packages / "hook.pth").write_text(hook)
    return packages / "hook.pth"


def interruption(moment: str, number: int) -> str:
    return INTERRUPTION.replace("MOMENT", moment).replace("SIGNAL", str(int(number)))


def pretend(version: tuple[int, int]) -> str:
    return f"import sys; sys.version_info = ({version[0]}, {version[1]}, 0, 'final', 0)\n"


def test_supported_versions_are_those_of_the_project() -> None:
    requires = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    admitted = [
        f"3.{minor}" for minor in range(20) if Requirement(f"python{requires}").specifier.contains(f"3.{minor}.0")
    ]
    text = (ROOT / "Makefile").read_text()
    lines = re.findall(r"^VERSIONS = (.*)$", text, re.MULTILINE)
    assert [sorted(line.split()) for line in lines] == [admitted]
    assert "{}, {} or {} is needed".format(*admitted) in text


def test_installs_from_nothing_and_again_only_after_a_change(bare: Project) -> None:
    bare.make("install")
    assert bare.installed() == ALL
    assert bare.make("install") == ""
    assert bare.builds == 1
    bare.make("install-dev")
    assert bare.installed() == ALL | {"tool": "1.0"}
    bare.make("install", "install-dev")
    assert bare.builds == 2
    bare.pin(dep="2.0", tool="1.0", torch="2.16.0", torchvision="0.30.0")
    bare.make("install")
    assert bare.installed() == {"tiny": "1.0", "dep": "2.0", "torch": "2.16.0", "torchvision": "0.30.0", "tool": "1.0"}
    (bare.folder / "pyproject.toml").write_text(f"{PYPROJECT}\n")
    os.utime(bare.folder / "pyproject.toml", (0, 0))  # as from an archive
    bare.make("install-dev")
    bare.make("install")
    assert bare.builds == 4


@pytest.mark.parametrize(
    ("moment", "number"),
    [("dep/last.py", signal.SIGKILL), ("dep/last.py", signal.SIGINT),
     ("dep-1.0.dist-info/INSTALLER", signal.SIGKILL), ("bin/dep", signal.SIGKILL)],
)  # fmt: skip
@pytest.mark.extended
def test_continues_what_was_interrupted(project: Project, moment: str, number: int) -> None:
    hook = add_hook(project.packages, interruption(moment, number))
    project.fail("install")
    hook.unlink()
    project.make("install")
    assert project.installed() == ALL
    assert project.make("install") == ""


@pytest.mark.extended
def test_continues_an_installation_of_pip_that_was_interrupted(bare: Project) -> None:
    hook = make_environment(bare.venv, interruption("pip/_internal/cli/main.py", signal.SIGKILL))
    bare.fail("install")
    assert (bare.packages / "pip").exists()
    hook.unlink()
    bare.make("install")
    assert bare.installed() == ALL


@pytest.mark.extended
def test_an_environment_that_was_half_made_is_made_again(bare: Project) -> None:
    script = bare.bin / "python"
    script.write_text(
        f'#!/bin/sh\ncase "$*" in *venv*) {PYTHON} "$@"; rm .venv/bin/activate; kill -9 0;; esac\nexec {PYTHON} "$@"\n'
    )
    script.chmod(0o755)
    bare.fail("install", f"PYTHON={script}")
    assert (bare.venv / "bin" / "python").exists()
    bare.make("install")
    assert (bare.venv / "bin" / "activate").exists()
    assert bare.installed() == ALL


@pytest.mark.extended
def test_an_upgrade_that_was_interrupted_and_taken_back(project: Project) -> None:
    project.make("install")
    pins = (project.folder / "constraints.txt").read_text()
    hook = add_hook(project.packages, interruption("dep/last.py", signal.SIGKILL))
    project.pin(dep="2.0", tool="1.0", torch="2.15.0", torchvision="0.29.2")
    project.fail("install")
    hook.unlink()
    (project.folder / "constraints.txt").write_text(pins)
    project.make("install")
    assert project.installed() == ALL


@pytest.mark.parametrize("own", [["torch-2.9.1+cpu"], ["torch-2.9.1+cpu", "torchvision-0.24.1+cpu"],
                                 ["torch-2.15.0+cpu"]])  # fmt: skip
@pytest.mark.extended
def test_the_users_own_torch_is_kept(project: Project, own: list[str]) -> None:
    project.install_own(*own)
    kept = dict(name.split("-") for name in own)
    kept = {"torchvision": "0.29.2" if kept["torch"] == "2.15.0+cpu" else "0.24.1"} | kept
    project.make("install")
    assert project.installed() == ALL | kept
    project.pin(dep="2.0", torch="2.16.0", torchvision="0.30.0")
    project.make("install")
    assert project.installed() == ALL | {"dep": "2.0"} | kept


@pytest.mark.extended
def test_a_torch_that_does_not_fit_is_an_error_and_stays(project: Project) -> None:
    project.install_own("torch-2.3.0+cpu")
    output = project.fail("install")
    assert "torch==2.3.0+cpu" in output
    assert "error: pip could not install the project" in output
    assert (project.packages / "torch-2.3.0+cpu.dist-info").exists()
    project.install_own("torch-2.9.1")
    project.make("install")
    assert project.installed()["torch"] == "2.9.1"


@pytest.mark.parametrize("version", [(2, 7), (3, 10), (3, 14)])
def test_a_python_that_is_not_supported(bare: Project, tmp_path: Path, version: tuple[int, int]) -> None:
    make_environment(tmp_path / "other", pretend(version))
    output = bare.fail("install", f"PYTHON={tmp_path}/other/bin/python")
    assert f"3.11, 3.12 or 3.13 is needed, but {tmp_path}/other/bin/python --version answers:\nPython 3." in output
    assert "make run PYTHON=" in output
    assert not bare.venv.exists()


def test_another_python_is_found(project: Project, tmp_path: Path) -> None:
    make_environment(tmp_path / "other", pretend((3, 10)))
    (project.bin / "python3").unlink()
    (project.bin / "python3").symlink_to(tmp_path / "other" / "bin" / "python")
    (project.bin / f"python{VERSION}").symlink_to(PYTHON)
    project.make("install")
    assert project.installed() == ALL


def test_a_python_that_is_missing(bare: Project) -> None:
    output = bare.fail("install", PYTHON="python3.99")
    assert "is needed, but python3.99 --version answers:" in output
    assert "not found" in output


@pytest.mark.extended
def test_a_python_without_venv(bare: Project, tmp_path: Path) -> None:
    hook = make_environment(tmp_path / "other", "import sys; sys.modules['venv'] = None\n")
    python = f"PYTHON={tmp_path}/other/bin/python"
    output = bare.fail("install", python)
    assert "No module named venv" in output
    assert f"sudo apt install python{VERSION}-venv" in output
    hook.unlink()
    bare.make("install", python)
    assert bare.installed() == ALL


@pytest.mark.extended
def test_a_python_without_ensurepip(bare: Project) -> None:
    hook = make_environment(bare.venv, "import sys; sys.modules['ensurepip'] = None\n")
    output = bare.fail("install")
    assert "No module named ensurepip" in output
    assert f"sudo apt install python{VERSION}-venv" in output
    hook.unlink()
    bare.make("install")
    assert bare.installed() == ALL


def test_an_environment_of_another_python_is_made_again(project: Project) -> None:
    project.make("install")
    other = {"3.11": (3, 12)}.get(VERSION, (3, 11))
    add_hook(project.packages, pretend(other))
    assert project.make("install") == ""  # it is supported
    assert "Making .venv" in project.make("install", "PYTHON=python3")
    assert project.installed() == ALL


@pytest.mark.extended
def test_an_environment_that_was_moved_is_made_again(project: Project) -> None:
    project.make("install")
    project.folder = project.folder.rename(project.folder.with_name("moved"))
    assert "Making .venv" in project.make("install")
    assert project.installed() == ALL


@pytest.mark.extended
def test_an_environment_that_has_lost_its_python_is_made_again(project: Project) -> None:
    (project.venv / "bin" / "python").unlink()
    (project.venv / "bin" / "python").symlink_to("/nowhere/python")
    project.make("install")
    assert project.installed() == ALL


@pytest.mark.extended
def test_a_broken_pip_is_repaired(project: Project) -> None:
    project.install_own("torch-2.9.1+cpu")
    shutil.rmtree(project.packages / "pip" / "_internal")
    project.make("install")
    assert project.installed()["torch"] == "2.9.1+cpu"


def test_a_link_is_removed_and_what_it_leads_to_is_kept(bare: Project, tmp_path: Path) -> None:
    (tmp_path / "precious" / "bin").mkdir(parents=True)
    (tmp_path / "precious" / "bin" / "python").write_text("not a Python")
    bare.venv.symlink_to(tmp_path / "precious")
    bare.make("clean")
    bare.venv.symlink_to(tmp_path / "precious")
    bare.make("install")
    assert bare.installed() == ALL
    assert not bare.venv.is_symlink()
    assert (tmp_path / "precious" / "bin" / "python").read_text() == "not a Python"


@pytest.mark.parametrize("name", ['a "b" c', "$(touch made) a", "`touch made` a", "a\\b c"])
def test_a_folder_whose_name_a_shell_would_change_is_an_error(bare: Project, name: str) -> None:
    """Such a folder is refused: pip writes its path into .venv/bin/hyperfl, and `sh` would run commands in it."""
    bare.folder = bare.folder.rename(bare.folder.with_name(name))
    files = sorted(bare.folder.iterdir())
    assert "error: the path of this folder must have no quotation mark" in bare.fail("run")
    assert sorted(bare.folder.iterdir()) == files


def test_nothing_outside_of_an_environment_is_removed(project: Project) -> None:
    """Records that an interrupted installation has left are removed, but no file outside, even for a name with `*`."""
    (project.packages / "a precious *.dist-info").mkdir()
    (project.folder / "precious").write_text("kept")
    project.make("install")
    assert not (project.packages / "a precious *.dist-info").exists()
    assert (project.folder / "precious").read_text() == "kept"
    assert project.installed() == ALL


def test_the_settings_of_others_do_not_lead_elsewhere(bare: Project, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    names = ("PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV", "PIP_PREFIX", "PIP_PYTHON", "PIP_ROOT", "PIP_TARGET")
    bare.make("install", PIP_USER="1", **dict.fromkeys(names, str(elsewhere)))
    assert bare.installed() == ALL
    assert not elsewhere.exists()
    assert list((tmp_path / "home").rglob("dep")) == []


def test_a_second_installation_waits_for_the_first(project: Project) -> None:
    script = project.bin / "python"
    script.write_text(f'#!/bin/sh\ncase "$*" in *flock*) echo >>waiting;; esac\nexec {PYTHON} "$@"\n')
    script.chmod(0o755)
    (project.folder / "wait").touch()
    first = project.start("install", f"PYTHON={script}")
    eventually(lambda: project.builds == 1, "a build", every=0.02)
    second = project.start("install", f"PYTHON={script}")
    eventually(lambda: len((project.folder / "waiting").read_text()) == 2, "the second", every=0.02)
    (project.folder / "wait").unlink()
    assert "Installing" in first.communicate()[0]
    assert second.communicate()[0] == ""
    assert first.returncode == second.returncode == 0
    assert project.builds == 1
    assert project.installed() == ALL
