"""Versions of the packages that a run depends on, and their comparison with those of other machines."""

import functools
import importlib.metadata
import platform
from collections.abc import Iterable, Mapping

from hyperfl_flwr import __version__

PACKAGES = ("flwr", "matplotlib", "numpy", "pydantic", "ray", "scikit-learn", "torch", "torchvision")
"""Packages on which results depend."""

COMMIT_VARIABLE = "HYPERFL_COMMIT"
"""Environment variable in which a study passes the checkout's commit to the processes of its cells."""

SHARED = ("hyperfl-flwr", "python", "flwr", "torch")
"""Packages that should have the same version on all machines of a federation."""


def versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Return the versions of Python, this project and other packages; omits packages that are not installed."""
    found = {"python": platform.python_version(), "hyperfl-flwr": __version__}
    installed = {name: _installed(name) for name in packages}
    return found | {name: version for name, version in installed.items() if version is not None}


@functools.cache
def _installed(name: str) -> str | None:
    """Return the version of an installed package, as this process has imported or would import it."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def shared_versions() -> dict[str, str]:
    """Return this machine's versions of the `SHARED` packages."""
    found = versions(("flwr", "torch"))
    return {name: found[name] for name in SHARED}


def differing(there: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Return the packages that another machine has in another version, as (name, its version, the version here).

    Args:
        there: Versions of the other machine by name; some may be missing.
    """
    here = shared_versions()
    return [
        (name, there[name], version)
        for name, version in here.items()
        if name in there and _comparable(name, there[name]) != _comparable(name, version)
    ]


def _comparable(name: str, version: str) -> str:
    """Return the part of a version that must be equal: without the CPU or GPU build; major.minor of Python."""
    return version.rpartition(".")[0] if name == "python" else version.partition("+")[0]
