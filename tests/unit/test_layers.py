"""Modules import lower floors only, and files stay small; the modules are parsed, not run."""

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TypeGuard

import pytest
from source_trees import tree_of

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("hyperfl_flwr", "strategies", "clients", "experiments")

FLOORS: dict[str, int] = {
    "hyperfl_flwr": 1,
    "hyperfl_flwr.core": 1,
    "hyperfl_flwr.protocol": 2, "hyperfl_flwr.data": 2, "hyperfl_flwr.models": 2, "hyperfl_flwr.flower": 2,
    "hyperfl_flwr.methods": 2,
    "hyperfl_flwr.metrics": 3, "hyperfl_flwr.training": 3, "hyperfl_flwr.privacy": 3, "hyperfl_flwr.config": 3,
    "hyperfl_flwr.node": 3, "hyperfl_flwr.server": 3,
    "hyperfl_flwr.runs": 4, "hyperfl_flwr.pages": 5,
    "hyperfl_flwr.attacks": 5, "strategies": 5, "clients": 5,
    "hyperfl_flwr.app": 6,
    "hyperfl_flwr.launch": 7, "hyperfl_flwr.results": 7,
    "hyperfl_flwr.audit": 8, "hyperfl_flwr.deploy": 8, "hyperfl_flwr.api": 8, "hyperfl_flwr.contract": 8,
    "hyperfl_flwr.cli": 9, "experiments": 9,
    "hyperfl_flwr.__main__": 10,
}  # fmt: skip
"""Folder -> floor. A module imports its own folder and folders of lower floors, never one of its own floor."""

WITHOUT_FLOWER = ("core", "data", "models", "methods", "metrics", "training", "privacy", "attacks")
"""Folders of `hyperfl_flwr` that import neither Flower nor Ray: the mathematics runs without them."""


FACADE = "hyperfl_flwr"
"""The package itself, which imports the Python interface in `__getattr__` and for type checkers only."""


def room_of(module: str) -> str | None:
    """Return the entry of `FLOORS` that a module belongs to."""
    parts = module.split(".")
    names = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    found = next((name for name in names if name in FLOORS), None)
    return found if found != "hyperfl_flwr" or module == found else None


def imported(tree: ast.AST, module: str, *, is_package: bool) -> Iterator[str]:
    """Yield the full names of what a module imports anywhere in it, also inside functions.

    Imports of `FACADE` for type checkers are left out, since they never run.
    """
    unrun = {id(part) for node in ast.walk(tree) if is_for_type_checkers(node) for part in node.body}
    for node in ast.walk(tree):
        if module == FACADE and id(node) in unrun:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                kept = parts[: len(parts) - node.level + is_package]
                base = ".".join([*kept, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def is_for_type_checkers(node: ast.AST) -> TypeGuard[ast.If]:
    """Return whether a statement is `if TYPE_CHECKING:`."""
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def problems(module: str, tree: ast.Module, *, is_package: bool = False) -> list[str]:
    """Return the problems of a module's imports."""
    room = room_of(module)
    if room is None:
        return [f"{module} lies in no folder of FLOORS"]
    found = []
    for name in imported(tree, module, is_package=is_package):
        if name in ("hyperfl_flwr.ROOT", "hyperfl_flwr.__version__"):
            continue
        top, other = name.split(".")[0], room_of(name)
        uses_flower = top in ("flwr", "ray") or (other == "hyperfl_flwr.flower" != room)
        if uses_flower and room.removeprefix("hyperfl_flwr.") in WITHOUT_FLOWER:
            found.append(f"{module} imports {name}")
        elif top in PACKAGES and other is None:
            found.append(f"{module} imports {name}, which lies in no folder of FLOORS")
        elif other is not None and other != room and FLOORS[other] >= FLOORS[room]:
            found.append(f"{module} imports {name}, which is not below it")
    return found


def modules() -> dict[str, Path]:
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


@pytest.mark.parametrize(("module", "path"), modules().items(), ids=modules())
def test_imports_point_down(module: str, path: Path) -> None:
    assert problems(module, tree_of(path), is_package=path.name == "__init__.py") == []


def test_every_folder_exists_and_has_a_row() -> None:
    """Every folder has a row in `FLOORS`, and no row is left of a folder that was renamed."""
    assert {room_of(module) for module in modules()} == set(FLOORS)


@cache
def arrows() -> dict[str, set[str]]:
    """Return which modules of the project each module imports, the packages' `__init__` left out."""
    files = modules()
    found: dict[str, set[str]] = {}
    for module, path in files.items():
        names = imported(tree_of(path), module, is_package=path.name == "__init__.py")
        targets = (name if name in files else name.rpartition(".")[0] for name in names)
        found[module] = {to for to in targets if to in files and files[to].name != "__init__.py"} - {module}
    return found


def rooms(graph: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Return which folders each folder imports."""
    found: dict[str, set[str]] = {name: set() for name in FLOORS}
    for module, others in graph.items():
        here = str(room_of(module))
        found[here] |= {str(room_of(other)) for other in others} - {here}
    return found


def floors(graph: Mapping[str, set[str]]) -> dict[str, int]:
    """Return the length of the longest path of imports that begins at each node; a cycle raises a RecursionError."""

    @cache
    def floor(name: str) -> int:
        return 1 + max((floor(other) for other in graph[name]), default=0)

    return {name: floor(name) for name in graph}


def test_the_house_has_nine_floors() -> None:
    """The command line is on floor 9, the last. `pytest tests/unit/test_layers.py -k nine -s` prints the numbers."""
    graph = rooms(arrows())
    counts = {
        "rooms": len(graph), "arrows": sum(map(len, graph.values())),
        "floors": max(floor for room, floor in floors(graph).items() if room != "hyperfl_flwr.__main__"),
    }  # fmt: skip
    print(counts)  # noqa: T201 - the figures of this command
    assert counts["floors"] == 9
    assert counts["arrows"] <= 174


def test_no_modules_import_each_other() -> None:
    """There is no longer cycle of imports either; imports inside functions count."""
    assert max(floors(arrows()).values()) < 36


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("hyperfl_flwr.core.rng", "import flwr.common"),
        ("hyperfl_flwr.data.sources.npz", "def f():\n    from ray import get"),
        ("hyperfl_flwr.training.local_sgd", "from hyperfl_flwr.flower.log import log"),
        ("hyperfl_flwr.config.run_config", "from hyperfl_flwr.server.exchange import X"),
        ("hyperfl_flwr.config.run_config", "from hyperfl_flwr.runs import manifest"),
        ("hyperfl_flwr.data.sources.npz", "from ...runs.manifest import code"),
        ("hyperfl_flwr.data.cache", "from ..runs import manifest"),
        ("hyperfl_flwr.server.exchange", "import strategies.fedavg"),
        ("strategies.engine.base", "from clients.engine.base import BaseClient"),
        ("clients.engine.base", "from strategies.engine import base"),
        ("clients.engine.base", "from hyperfl_flwr.app.methods import METHODS"),
        ("hyperfl_flwr.app.methods", "from hyperfl_flwr.launch import simulation"),
        ("hyperfl_flwr.node.cohort", "from hyperfl_flwr.server.exchange import X"),
        ("hyperfl_flwr.launch.simulation", "from hyperfl_flwr.cli.main import cli"),
        ("hyperfl_flwr.launch.simulation", "import experiments.study"),
        ("hyperfl_flwr", "from hyperfl_flwr.core.errors import HyperFLError"),
        ("hyperfl_flwr", "if TYPE_CHECKING:\n    pass\nelse:\n    from hyperfl_flwr.api.train import run"),
        ("hyperfl_flwr.launch.follow", "if TYPE_CHECKING:\n    from hyperfl_flwr.api.run import Run"),
        ("hyperfl_flwr.api.train", "from hyperfl_flwr.deploy.run import deployment"),
        ("hyperfl_flwr.news", ""),
        ("hyperfl_flwr.server.exchange", "from hyperfl_flwr.news import x"),
    ],
)
def test_a_wrong_import_is_seen(module: str, source: str) -> None:
    """Each source breaks exactly one rule, which is reported."""
    assert len(problems(module, ast.parse(source))) == 1


def test_right_imports_are_let_through() -> None:
    source = "import numpy\nfrom hyperfl_flwr import ROOT\nfrom . import ledger\nimport flwr.app"
    assert problems("hyperfl_flwr.node.cohort", ast.parse(source)) == []
    for_type_checkers = "if TYPE_CHECKING:\n    from hyperfl_flwr.api.train import run"
    assert problems("hyperfl_flwr", ast.parse(for_type_checkers), is_package=True) == []
    below = "from strategies.engine.base import X\nimport hyperfl_flwr.core.rng"
    assert problems("strategies.fedavg", ast.parse(below)) == []


def test_a_circle_is_found() -> None:
    with pytest.raises(RecursionError):
        floors({"a": {"b"}, "b": {"a"}})


def test_no_file_is_over_300_lines() -> None:
    """The limit of the house style."""
    folders = [ROOT / name for name in (*PACKAGES, "scripts", "benchmarks")]
    sizes = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for f in folders for path in f.rglob("*.py")
    }
    assert {name: size for name, size in sizes.items() if size > 300} == {}


def test_no_file_is_called_utils_or_common() -> None:
    names = [module.rpartition(".")[2] for module in modules()]
    assert not {"utils", "util", "common", "helpers", "misc"} & set(names)


def test_no_two_test_files_have_one_name() -> None:
    """Pytest would collect one of such files and report an error for the other."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
