"""Foreign packages with the names of this project's packages are refused and not run."""

import ast
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from source_trees import tree_of

from hyperfl_flwr import ROOT
from hyperfl_flwr.core.errors import InstallationError
from hyperfl_flwr.core.packages.package_guard import ALL, APP, refuse_foreign_packages


def test_this_installation_is_accepted() -> None:
    refuse_foreign_packages(ALL)


def test_a_missing_package_is_told() -> None:
    with pytest.raises(InstallationError, match="'no_such_package' is missing"):
        refuse_foreign_packages(("no_such_package",))


def test_a_package_from_elsewhere_is_told() -> None:
    """Numpy, which lies outside of the project, stands for a foreign package."""
    with pytest.raises(InstallationError, match=r"'numpy' would be imported from .*numpy.*rename or uninstall"):
        refuse_foreign_packages(("numpy",))


def test_a_package_that_a_program_has_made_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a package has no file."""
    monkeypatch.setitem(sys.modules, "clients", ModuleType("clients"))
    with pytest.raises(InstallationError, match="'clients' would be imported from nowhere"):
        refuse_foreign_packages(APP)


def modules(package: str) -> Iterator[tuple[str, ast.Module]]:
    for path in sorted((ROOT / package).rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        yield name, tree_of(path)


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else []


def guarded_by(tree: ast.Module) -> str | None:
    """Return the guard that a module imports before anything else of the project, or None."""
    first = next((name for node in tree.body for name in imported(node) if name.split(".")[0] in (*ALL, OURS)), "")
    return first if first in (GUARD_APP, GUARD_ALL) else None


OURS = "hyperfl_flwr"
GUARD_APP, GUARD_ALL = (f"hyperfl_flwr.core.packages.guard_{which}" for which in ("app", "all"))


@functools.cache
def importing(*packages: str) -> list[str]:
    """Return the modules of `hyperfl_flwr` that import one of some guarded packages, at the top or inside functions."""
    return [
        name
        for name, tree in modules(OURS)
        if any(top.split(".")[0] in packages for node in ast.walk(tree) for top in imported(node))
    ]


def test_every_folder_that_imports_a_package_is_guarded() -> None:
    """Other folders are not guarded, so that a notebook beside a folder `clients` can use them."""
    needing = {name.rpartition(".")[0] for name in importing(*APP)}
    files = dict(modules(OURS))
    guards = {name: guard for name, tree in files.items() if (guard := guarded_by(tree))}
    assert needing == set(guards) - {"hyperfl_flwr.core.packages.guard_app", "hyperfl_flwr.core.packages.guard_all"}
    assert guards.pop("hyperfl_flwr.cli") == GUARD_ALL  # it loads the studies' commands
    assert set(guards.values()) == {GUARD_APP}
    assert guarded_by(dict(modules("experiments"))["experiments"]) == GUARD_ALL


def test_nothing_but_the_studies_imports_the_studies() -> None:
    """`hyperfl run` works without the studies: an entry point registers their commands.

    The package names their functions for type checkers, and imports them when they are used.
    """
    assert importing("experiments") == ["hyperfl_flwr"]
    root = dict(modules(OURS))["hyperfl_flwr"]
    assert not any(top.split(".")[0] == "experiments" for node in root.body for top in imported(node))


@pytest.mark.parametrize("lines", [[f"import {GUARD_ALL}", "from clients import x"], ["x = 1"], []])
def test_a_guard_is_seen_only_if_it_comes_first(lines: list[str]) -> None:
    assert guarded_by(ast.parse("\n".join(lines))) == (GUARD_ALL if len(lines) == 2 else None)
    assert guarded_by(ast.parse("\n".join(lines[::-1]))) is None


MARK = "import os, pathlib\npathlib.Path(os.environ['MARK']).touch()\n"
"""Code of a foreign package: it leaves a mark if it is run."""

EACH = """
import importlib, os, sys

for module in sys.argv[1:]:
    child = os.fork()
    if not child:
        try:
            importlib.import_module(module)
        except Exception as error:
            print(module, type(error).__name__, error, flush=True)
        else:
            print(module, "imported", flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""
"""Imports each module in a separate process that has imported no other one."""


def results(folder: Path, names: list[str], before: str = "") -> tuple[dict[str, str], bool]:
    """Import modules like a script in a folder: (module -> its result, whether a foreign package was run)."""
    mark = folder / "mark"
    done = subprocess.run(
        [sys.executable, "-c", before + EACH, *names], cwd=folder, capture_output=True, text=True, check=False,
        env={**os.environ, "MARK": str(mark), "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    lines = [line.partition(" ") for line in done.stdout.splitlines()]
    assert [name for name, _, _ in lines] == names, done.stderr
    return {name: what for name, _, what in lines}, mark.exists()


def make_foreign(folder: Path, name: str, *, is_package: bool = True) -> Path:
    """Write a foreign package, or a module, that leaves a mark when it is run."""
    path = folder / name / "__init__.py" if is_package else folder / f"{name}.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(MARK)
    if is_package:
        for module in ("base", "setting", "run", "findings"):
            (path.parent / f"{module}.py").write_text(MARK)
    return path


@pytest.mark.parametrize("is_package", [True, False])
@pytest.mark.parametrize("name", ALL)
def test_no_module_runs_a_foreign_package(tmp_path: Path, name: str, is_package: bool) -> None:
    """Each module refuses it when it is imported as the first one, in a folder with a foreign package or module."""
    path = make_foreign(tmp_path, name, is_package=is_package)
    needed = (
        ["hyperfl_flwr.cli.main"]
        if name == "experiments"
        else [*importing(*APP), *(module for module, _ in modules("experiments"))]
    )
    found, has_run = results(tmp_path, sorted(set(needed)))
    refusal = f"InstallationError the package '{name}' would be imported from {path}"
    assert {module: what for module, what in found.items() if not what.startswith(refusal)} == {}
    assert not has_run


@pytest.mark.parametrize("name", ALL)
def test_a_foreign_package_that_was_imported_before_is_refused(tmp_path: Path, name: str) -> None:
    """Modules of the foreign package are not taken for this project's either."""
    path = make_foreign(tmp_path, name)
    before = f"import os, {name}.base, {name}.setting, {name}.run, {name}.findings; os.remove(os.environ['MARK'])\n"
    needed = (
        ["hyperfl_flwr.cli.main"] if name == "experiments" else [*importing(*APP), "hyperfl_flwr.launch.simulation"]
    )
    found, has_run = results(tmp_path, needed, before)
    refusal = f"InstallationError the package '{name}' would be imported from {path}"
    assert {module: what for module, what in found.items() if not what.startswith(refusal)} == {}
    assert not has_run


def test_what_needs_none_of_the_packages_is_imported_beside_foreign_ones(tmp_path: Path) -> None:
    for name in ALL:
        make_foreign(tmp_path, name)
    free = ["hyperfl_flwr", *(f"hyperfl_flwr.{name}" for name in ("models", "data.registry", "training", "metrics"))]
    found, has_run = results(tmp_path, free)
    assert set(found.values()) == {"imported"}
    assert not has_run


def test_the_app_is_imported_beside_a_foreign_package_that_it_does_not_need(tmp_path: Path) -> None:
    make_foreign(tmp_path, "experiments")
    found, has_run = results(
        tmp_path, ["hyperfl_flwr.app.methods", "hyperfl_flwr.app.client", "strategies.engine.base"]
    )
    assert set(found.values()) == {"imported"}
    assert not has_run


def test_the_command_line_names_the_foreign_package(tmp_path: Path) -> None:
    make_foreign(tmp_path, "clients")
    done = subprocess.run(
        [sys.executable, "-m", "hyperfl_flwr", "--version"], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**os.environ, "MARK": str(tmp_path / "mark"), "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: the package 'clients' would be imported from {tmp_path / 'clients'}")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "mark").exists()


COMMANDS = """
import sys, pathlib

here = sys.argv.pop(1)
sys.path[:] = [here] + [path for path in sys.path if not (pathlib.Path(path) / "hyperfl_flwr/__init__.py").is_file()]
from hyperfl_flwr.__main__ import main
main()
"""
"""Runs the command line of the installation in a folder, with no other installation on the path."""


def command_line(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", COMMANDS, str(folder), *words], capture_output=True, text=True, check=False,
        env={**os.environ, "MARK": str(folder / "mark")},
    )  # fmt: skip


def make_distribution(folder: Path, name: str, commands: str) -> None:
    """Write the metadata of an installed distribution that registers commands for `hyperfl`."""
    path = folder / f"{name}-1.0.dist-info"
    path.mkdir()
    (path / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (path / "entry_points.txt").write_text(f"[hyperfl.commands]\nx = {commands}\n")


@pytest.fixture
def installation(tmp_path: Path) -> Path:
    """Return a folder with a copy of this project's packages and with its entry point."""
    for name in (OURS, *ALL):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    make_distribution(tmp_path, "hyperfl_flwr", "experiments.commands:studies")
    return tmp_path


def test_commands_of_other_packages_are_not_loaded(installation: Path) -> None:
    """A damaged one would end every command, and one with the name of a command of ours would replace it."""
    make_foreign(installation, "other")
    make_distribution(installation, "other", "other:commands")
    make_distribution(installation, "missing", "no_such_package:commands")
    done = command_line(installation, "--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert not (installation / "mark").exists()
    assert "study" in command_line(installation, "--help").stdout


def test_the_command_line_works_without_the_studies(installation: Path) -> None:
    shutil.rmtree(installation / "experiments")
    done = command_line(installation, "--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert "study" not in command_line(installation, "--help").stdout
