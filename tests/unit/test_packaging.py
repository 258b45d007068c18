"""What is installed: the pinned versions fit the requirements, and an interrupted installation is repaired."""

import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(not (ROOT / "constraints.txt").is_file(), reason="needs a checkout of the project")


@pytest.fixture
def installer(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    specification = importlib.util.spec_from_file_location("install", ROOT / "scripts" / "install.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    monkeypatch.delenv("PYTHON", raising=False)
    return module


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    (tmp_path / "constraints.txt").write_text("# known to work\nnumpy==2.0\ntorch==2.15.0\ntorchvision==0.29.2\n")
    return tmp_path


def make_venv(root: Path) -> Path:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(root / ".venv")], check=True)
    return root / ".venv"


def add_package(packages: Path, name: str, version: str) -> Path:
    (packages / name).mkdir()
    (packages / name / "__init__.py").write_text("x = 1\n")
    record = packages / f"{name}-{version}.dist-info"
    record.mkdir()
    (record / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    (record / "INSTALLER").write_text("pip\n")
    (record / "RECORD").write_text(f"{name}/__init__.py,sha256=x,6\n{name}/__pycache__/__init__.pyc,,\n")
    return record


def read_pins() -> dict[str, str]:
    lines = [line.strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def test_constraints_fit_every_requirement() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = [Requirement(line) for line in project["dependencies"]]
    requirements += [Requirement(line) for group in project["optional-dependencies"].values() for line in group]
    pins = {canonicalize_name(name): version for name, version in read_pins().items()}
    for requirement in requirements:
        version = pins.get(canonicalize_name(requirement.name))
        assert version is not None, f"constraints.txt must pin {requirement.name}"
        assert requirement.specifier.contains(version), f"{requirement} does not admit {version}"


def test_constraints_leave_room_for_another_build_of_torch() -> None:
    names = set(read_pins())
    assert not [name for name in names if name.startswith(("nvidia", "cuda", "triton"))]
    assert not names & {"sympy", "networkx", "pip", "setuptools"}
    assert Requirement("torch==2.15.0").specifier.contains("2.15.0+cpu")


def test_no_file_names_a_package_registry() -> None:
    words = [
        ["pypi", "org"],
        ["python" + "hosted", "org"],
        ["download", "pytorch", "org"],
        ["registry", "npmjs", "org"],
    ]
    hosts = re.compile("|".join(re.escape(".".join(word)) for word in words))
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if listed.returncode != 0:
        pytest.skip("needs git")
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        if path.is_file() and path != Path(__file__).resolve():
            assert not hosts.search(path.read_text(errors="ignore")), name


def test_supported_versions_are_those_of_the_project(installer: ModuleType) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    admitted = Requirement(f"python{project['requires-python']}").specifier
    versions = [(3, minor) for minor in range(7, 20) if admitted.contains(f"3.{minor}.0")]
    assert list(installer.SUPPORTED) == versions


def test_an_unfinished_environment_is_found(installer: ModuleType, root: Path) -> None:
    assert "not finished" in installer.fault_of(root / ".venv", root)
    venv = make_venv(root)
    assert installer.fault_of(venv, root) == "has no working pip"
    installer.write_note(venv, complete=True, root=str(root))
    assert installer.fault_of(venv, root) == ""
    installer.write_note(venv, complete=True, root="/elsewhere")
    assert "cannot be moved" in installer.fault_of(venv, root)
    (venv / "bin" / "python").unlink()
    assert "not finished" in installer.fault_of(venv, root)


def test_the_chosen_python_must_be_the_one_of_the_environment(
    installer: ModuleType, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    venv = make_venv(root)
    installer.write_note(venv, complete=True, root=str(root))
    monkeypatch.setenv("PYTHON", "python3.99")
    assert installer.fault_of(venv, root) == ""
    monkeypatch.setattr(installer.sys, "version_info", (3, 99, 0))
    assert "PYTHON asks for 3.99" in installer.fault_of(venv, root)
    with pytest.raises(installer.InstallError, match=r"3\.13 is needed, but python3\.99 is"):
        installer.check_python()


def test_a_missing_module_is_named_with_its_package(installer: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    installer.check_python()
    monkeypatch.setattr(installer.importlib.util, "find_spec", lambda name: None if name == "ensurepip" else name)
    with pytest.raises(installer.InstallError, match=r"apt install python3\.\d+-venv"):
        installer.check_python()


def test_installs_once_and_again_after_a_change_or_an_interruption(
    installer: ModuleType, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    venv = make_venv(root)
    calls: list[list[str]] = []
    run = installer.run
    code = 0

    def fake(command: list[str], **options: object) -> "subprocess.CompletedProcess[str]":
        if "pip" not in command:
            return run(command, **options)
        if "install" in command:
            calls.append(command)
            (venv / "bin" / "hyperfl").touch()
        return subprocess.CompletedProcess(command, code if "install" in command else 0, "", "")

    monkeypatch.setattr(installer, "run", fake)
    installer.install(root, dev=False)
    installer.install(root, dev=False)
    assert [call[-1] for call in calls] == ["."]
    installer.install(root, dev=True)
    installer.install(root, dev=False)  # the tools stay
    assert [call[-1] for call in calls] == [".", ".[dev]"]
    (root / "constraints.txt").write_text("numpy==2.1\n")
    code = 1
    with pytest.raises(installer.InstallError, match="Start it again"):
        installer.install(root, dev=False)
    code = 0
    installer.install(root, dev=False)
    installer.install(root, dev=False)
    assert [call[-1] for call in calls[2:]] == [".[dev]", ".[dev]"]
    assert (venv / "constraints.txt").read_text() == "numpy==2.1\n"


def test_incomplete_packages_are_installed_again(installer: ModuleType, root: Path) -> None:
    packages = installer.site_packages(make_venv(root))
    whole, short, unrecorded = (add_package(packages, name, "1.0") for name in ("whole", "short", "unrecorded"))
    (packages / "short" / "__init__.py").write_text("x")
    (unrecorded / "RECORD").unlink()
    (packages / "~orch").mkdir()
    assert installer.damaged(packages) == [short, unrecorded]
    installer.mend(packages)
    assert sorted(path.name for path in packages.iterdir()) == ["short", "unrecorded", "whole", whole.name]


def test_the_users_own_torch_is_kept(installer: ModuleType, root: Path) -> None:
    venv = make_venv(root)
    assert not installer.has_own_torch(root, venv, {})
    record = add_package(installer.site_packages(venv), "torch", "2.15.0+cpu")
    assert not installer.has_own_torch(root, venv, {})  # it satisfies the pin
    record.rename(record.with_name("torch-2.9.1+cpu.dist-info"))
    assert installer.has_own_torch(root, venv, {})
    assert not installer.has_own_torch(root, venv, {"own_torch": False})  # we installed it, and the pin has changed
    assert installer.constraints_for(root, own_torch=True) == "numpy==2.0\n"
    assert "torch==2.15.0" in installer.constraints_for(root, own_torch=False)
