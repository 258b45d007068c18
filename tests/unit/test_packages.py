"""Foreign packages that carry the names of this project's own are refused, not run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hyperfl_flwr import ROOT
from hyperfl_flwr.errors import InstallationError
from hyperfl_flwr.packages import ALL, refuse_foreign_packages


def test_this_installation_is_accepted() -> None:
    refuse_foreign_packages(ALL)


def test_a_missing_package_is_told() -> None:
    with pytest.raises(InstallationError, match="'no_such_package' is missing"):
        refuse_foreign_packages(("no_such_package",))


def test_a_package_from_elsewhere_is_told() -> None:
    """Numpy lies elsewhere."""
    with pytest.raises(InstallationError, match=r"'numpy' would be imported from .*numpy.*rename or uninstall"):
        refuse_foreign_packages(("numpy",))


FOREIGN = {
    "an empty package": {"__init__.py": ""},
    "one with the same modules": {
        "__init__.py": "print('FOREIGN CODE RAN')", "base.py": "BaseClient = BaseStrategy = object",
    },
}  # fmt: skip


@pytest.mark.parametrize("module", ["hyperfl_flwr.server_app", "hyperfl_flwr.client_app", "hyperfl_flwr.__main__"])
@pytest.mark.parametrize("name", ["clients", "strategies"])
@pytest.mark.parametrize("files", FOREIGN.values(), ids=FOREIGN)
def test_a_foreign_package_first_on_the_path_is_refused(
    tmp_path: Path, module: str, name: str, files: dict[str, str]
) -> None:
    """Every entry point says which package is wrong and where it lies, before any of the foreign code runs."""
    (tmp_path / name).mkdir()
    for file, text in files.items():
        (tmp_path / name / file).write_text(text)
    program = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; import {module}"
    if module.endswith("main__"):
        program += "; sys.argv = ['hyperfl', 'version']; hyperfl_flwr.__main__.main()"
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode != 0
    said = " ".join(result.stderr.split())
    assert f"the package '{name}' would be imported from {tmp_path / name}" in said
    assert "FOREIGN CODE RAN" not in result.stdout
