"""The versions of what a run depends on, on this machine and on others."""

import importlib.metadata
import platform
from collections.abc import Iterable, Mapping

from hyperfl_flwr import __version__

PACKAGES = ("flwr", "matplotlib", "numpy", "pydantic", "ray", "scikit-learn", "torch", "torchvision")
"""On which results depend."""

COMMIT_VARIABLE = "HYPERFL_COMMIT"
"""Environment variable by which a study tells the processes of its cells the checkout's commit, the same for all."""

SHARED = ("hyperfl-flwr", "python", "flwr", "torch")
"""What all machines of a federation should have in one version."""


def versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Return the versions of Python, this project and packages; those that are not installed are left out."""
    found = {"python": platform.python_version(), "hyperfl-flwr": __version__}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def shared_versions() -> dict[str, str]:
    """Return the versions here of what all machines of a federation should have in one."""
    found = versions(("flwr", "torch"))
    return {name: found[name] for name in SHARED}


def differing(there: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Return what another machine has in another version, as (name, its version, the one here).

    Args:
        there: Its versions, of which some may be missing.
    """
    here = shared_versions()
    return [
        (name, there[name], version)
        for name, version in here.items()
        if name in there and _comparable(name, there[name]) != _comparable(name, version)
    ]


def _comparable(name: str, version: str) -> str:
    """Return what must be the same: not the build for a CPU or a GPU, and of Python the first two numbers."""
    return version.rpartition(".")[0] if name == "python" else version.partition("+")[0]
