"""Imports point down only, and files stay small: the modules are read, not run."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("hyperfl_flwr", "strategies", "clients", "experiments")

LAYERS: dict[str, int] = {
    **dict.fromkeys(
        (
            "hyperfl_flwr.models", "hyperfl_flwr.data", "hyperfl_flwr.training", "hyperfl_flwr.metrics",
            "hyperfl_flwr.attacks", "hyperfl_flwr.privacy",
            "hyperfl_flwr.config.run_config", "hyperfl_flwr.config.sections", "hyperfl_flwr.core.rng", "hyperfl_flwr.core.device",
            "hyperfl_flwr.core.errors",
            "hyperfl_flwr.core.checked_files", "hyperfl_flwr.core.storage", "hyperfl_flwr.core.commit", "hyperfl_flwr.core.versions",
            "hyperfl_flwr.metrics.predictions", "hyperfl_flwr.core.setting_types", "hyperfl_flwr.core.optimisers",
            "hyperfl_flwr.core.toml_files", "hyperfl_flwr.core.folder_lock",
        ),
        0,
    ),
    **dict.fromkeys(
        (
            "hyperfl_flwr.protocol.messages", "hyperfl_flwr.config.node_config", "hyperfl_flwr.protocol.queries", "hyperfl_flwr.protocol.arrays",
            "hyperfl_flwr.protocol.sizes", "hyperfl_flwr.protocol.reproducible_sum",
            "hyperfl_flwr.node.cohort", "hyperfl_flwr.server.exchange", "hyperfl_flwr.server.federation", "hyperfl_flwr.server.membership",
            "hyperfl_flwr.server.handshake", "hyperfl_flwr.server.in_process_grid",
            "hyperfl_flwr.node.private_state", "hyperfl_flwr.runs.checkpoint", "hyperfl_flwr.runs.run_directory", "hyperfl_flwr.runs.novel_results",
            "hyperfl_flwr.node.saved_models",
            "hyperfl_flwr.runs.summary",
            "hyperfl_flwr.runs.plots", "hyperfl_flwr.runs.resume", "hyperfl_flwr.runs.manifest", "hyperfl_flwr.core.package_guard",
            "hyperfl_flwr.core.guard_all", "hyperfl_flwr.core.guard_app",
            "hyperfl_flwr.server.ray_pool", "hyperfl_flwr.node.ledger", "hyperfl_flwr.node.ledger_app", "hyperfl_flwr.models.custom.provenance",
            "hyperfl_flwr.deploy.fleet_api", "hyperfl_flwr.server.fetching", "hyperfl_flwr.server.exclusions",
            "hyperfl_flwr.server.greetings", "hyperfl_flwr.runs.run_data",
        ),
        1,
    ),
    **dict.fromkeys(("strategies", "clients"), 2),
    **dict.fromkeys(
        (
            "hyperfl_flwr.app.server", "hyperfl_flwr.app.client", "hyperfl_flwr.app.node", "hyperfl_flwr.app.methods",
            "hyperfl_flwr.app.personalize", "hyperfl_flwr.app.resolved",
            "hyperfl_flwr.app.restore", "hyperfl_flwr.results.export", "hyperfl_flwr.results.join",
        ),
        3,
    ),
    "experiments": 4,
    **dict.fromkeys(
        (
            "hyperfl_flwr.cli.export",
            "hyperfl_flwr.cli.main", "hyperfl_flwr.cli.audit", "experiments.commands", "hyperfl_flwr.launch.console",
            "hyperfl_flwr.cli.personalize", "hyperfl_flwr.cli.deploy", "hyperfl_flwr.cli.sample_folders",
            "hyperfl_flwr.cli.ledger", "hyperfl_flwr.cli.tensorboard", "hyperfl_flwr.cli.progress",
            "hyperfl_flwr.cli.doctor", "hyperfl_flwr.__main__",
        ),
        5,
    ),
}  # fmt: skip
"""Package or module -> layer; what is inside a package belongs to the package's layer."""

STRANGERS = (
    ("strategies", "clients"), ("hyperfl_flwr.app.server", "hyperfl_flwr.app.client"),
    ("hyperfl_flwr.app.server", "hyperfl_flwr.app.node"),
)  # fmt: skip
"""Sides that meet in messages only and never import each other."""


def part_of(module: str) -> str | None:
    """Return the entry of `LAYERS` that a module belongs to."""
    parts = module.split(".")
    names = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((name for name in names if name in LAYERS), None)


def imported(tree: ast.AST, module: str, *, is_package: bool) -> Iterator[str]:
    """Yield the full names of what a module imports anywhere in it, also inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                kept = parts[: len(parts) - node.level + is_package]
                base = ".".join([*kept, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def problems(module: str, source: str, *, is_package: bool = False) -> list[str]:
    """Return what is wrong with a module's imports."""
    part = part_of(module)
    if module == "hyperfl_flwr":
        names = list(imported(ast.parse(source), module, is_package=True))
        return [f"{module} imports {name}" for name in names if name.split(".")[0] in PACKAGES]
    if part is None:
        return [f"{module} is assigned to no layer"]
    found = []
    for name in imported(ast.parse(source), module, is_package=is_package):
        top, other = name.split(".")[0], part_of(name)
        if top in ("flwr", "ray") and LAYERS[part] == 0:
            found.append(f"{module} in L0 imports {name}")
        elif other is None:
            if top in PACKAGES and name not in ("hyperfl_flwr.ROOT", "hyperfl_flwr.__version__"):
                found.append(f"{module} imports {name}, which is assigned to no layer")
        elif LAYERS[other] > LAYERS[part]:
            found.append(f"{module} imports {name}, which is above it")
        elif any({part, other} == set(pair) for pair in STRANGERS):
            found.append(f"{module} imports {name}, which is beside it")
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
    """docs/architecture: L0 plain torch and numpy, L1 Flower, L2 either side, L3 both, L4 studies, L5 command line."""
    assert problems(module, path.read_text(), is_package=path.name == "__init__.py") == []


def test_every_entry_exists() -> None:
    """A module that was renamed must not leave its old name behind."""
    assert set(LAYERS) <= set(modules())


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("hyperfl_flwr.core.rng", "import flwr.common"),
        ("hyperfl_flwr.data.sources.npz", "def f():\n    from ray import get"),
        ("hyperfl_flwr.config.run_config", "from hyperfl_flwr.protocol.messages import CONFIG"),
        ("hyperfl_flwr.config.run_config", "from hyperfl_flwr import messages"),
        ("hyperfl_flwr.data.sources.npz", "from ..messages import CONFIG"),
        ("hyperfl_flwr.data.sources.npz", "from .. import grid"),
        ("hyperfl_flwr.server.exchange", "import strategies.engine.base"),
        ("strategies.engine.base", "from clients.engine.base import BaseClient"),
        ("clients.engine.base", "from strategies import base"),
        ("clients.engine.base", "from hyperfl_flwr.app.methods import METHODS"),
        ("hyperfl_flwr.app.server", "import hyperfl_flwr.app.client"),
        ("hyperfl_flwr.app.methods", "from experiments import run"),
        ("hyperfl_flwr.launch.simulation", "from hyperfl_flwr.cli import main"),
        ("hyperfl_flwr", "from hyperfl_flwr.core.errors import HyperFLError"),
        ("hyperfl_flwr.news", ""),
        ("hyperfl_flwr.server.exchange", "from hyperfl_flwr.news import x"),
    ],
)
def test_a_wrong_import_is_seen(module: str, source: str) -> None:
    """Each breaks one rule."""
    assert len(problems(module, source)) == 1


def test_right_imports_are_let_through() -> None:
    source = "import numpy\nfrom hyperfl_flwr import ROOT, messages\nfrom . import grid\nimport flwr.app"
    assert problems("hyperfl_flwr.node.cohort", source) == []
    assert (
        problems("strategies.engine.base", "from strategies.fedavg import FedAvg\nfrom hyperfl_flwr.core.rng import x")
        == []
    )


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
    """Of such, one is collected and the other is an error."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
