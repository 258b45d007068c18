"""A guard against foreign packages that carry the names of this project's own.

`clients`, `strategies` and `experiments` are common names. Where another package of such a name comes first on the
import path, everything would fail in strange ways, or silently run somebody else's code.
"""

import importlib.util
from pathlib import Path

from hyperfl_flwr import ROOT
from hyperfl_flwr.core.errors import InstallationError

APP = ("clients", "strategies")
"""The packages that Flower's app bundle holds beside `hyperfl_flwr`."""

STUDIES = "experiments"
"""The package of the studies, which an installation may lack."""

ALL = (*APP, STUDIES)
"""The packages of an installation or a checkout."""


def refuse_foreign_packages(names: tuple[str, ...]) -> None:
    """Check that packages are this project's own.

    Args:
        names: `APP` or `ALL`.

    Raises:
        InstallationError: If one would be imported from elsewhere, or is missing and not `STUDIES`.
    """
    for name in names:
        try:
            spec = importlib.util.find_spec(name)
        except ValueError:  # it has been made by a program and not imported
            places = ["nowhere"]
        else:
            if spec is None:
                if name == STUDIES:
                    continue  # everything else works without them
                raise InstallationError(f"the package {name!r} is missing from {ROOT}; install hyperfl-flwr again")
            places = [spec.origin] if spec.origin else list(spec.submodule_search_locations or ())
        expected = ROOT / name
        if not any(Path(place).resolve().is_relative_to(expected) for place in places):
            raise InstallationError(
                f"the package {name!r} would be imported from {', '.join(places)}, expected {expected}; rename or "
                f"uninstall the other one, or start from another folder"
            )
