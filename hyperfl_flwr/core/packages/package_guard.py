"""Refuse foreign packages that have the names of this project's top-level packages.

`clients`, `strategies` and `experiments` are common names. If another package with such a name came first on the import
path, imports would fail with misleading errors, or foreign code would run silently.
"""

import importlib.util
from pathlib import Path

from hyperfl_flwr import ROOT
from hyperfl_flwr.core.errors import InstallationError

APP = ("clients", "strategies")
"""Packages in Flower's app bundle, in addition to `hyperfl_flwr`."""

STUDIES = "experiments"
"""Package of the studies; an installation may lack it."""

ALL = (*APP, STUDIES)
"""Packages of an installation or a checkout."""


def refuse_foreign_packages(names: tuple[str, ...]) -> None:
    """Check that importing these names gives this project's packages; does not import them.

    Args:
        names: `APP` or `ALL`.

    Raises:
        InstallationError: If a package would be imported from another place, or if one other than `STUDIES` is missing.
    """
    for name in names:
        try:
            spec = importlib.util.find_spec(name)
        except ValueError:  # a module without a spec, which a program has put into sys.modules
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
                f"uninstall the other package, or start from another folder"
            )
