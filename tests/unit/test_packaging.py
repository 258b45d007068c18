"""The pinned versions fit the requirements, and leave the build of torch and the package index to the user."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(not (ROOT / "constraints.txt").is_file(), reason="needs a checkout of the project")


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
