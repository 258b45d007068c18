"""Tell which version of this project's code a process runs, and which versions have computed a run's results."""

import hashlib
import os
from collections.abc import Mapping
from typing import Any

from hyperfl_flwr import ROOT
from hyperfl_flwr.core.packages.commit import COMMIT, SOURCE
from hyperfl_flwr.core.packages.package_guard import APP
from hyperfl_flwr.core.packages.source_files import digest_of
from hyperfl_flwr.core.packages.versions import COMMIT_VARIABLE

SHOWN = 12
"""Number of digits of a commit in a table."""


def code_digest() -> str:
    """Return the SHA-256 of the names and contents of this project's files that this process imports."""
    packages = ("hyperfl_flwr", *APP)
    return hashlib.sha256(" ".join(digest_of(ROOT / name) for name in packages).encode()).hexdigest()


def code_entry() -> dict[str, Any]:
    """Return the entry `code` of a manifest.

    Returns:
        The git commit, True in `dirty` if files differ from it (both None if unknown), and the app's folder; where the
        commit does not say what the files are, also their SHA-256; in a bundle that of the files it was made from.
    """
    commit, _, dirty = (COMMIT or os.environ.get(COMMIT_VARIABLE, "")).partition("-")
    entry = {"commit": commit or None, "dirty": dirty == "dirty" if commit else None, "app": str(ROOT)}
    return entry if commit and not dirty else entry | {"sha256": SOURCE or code_digest()}


def code_versions(manifest: Mapping[str, Any]) -> list[str]:
    """Return the versions of the code that have computed a run: that which began it, and those that have resumed it.

    Equal texts are equal code: a commit, and without one, or with changes since, the start of the files' SHA-256, which
    manifests of earlier versions lack.
    """
    return [_version(part["code"], part.get("versions", {})) for part in (manifest, *manifest.get("resumed", ()))]


def _version(code: Mapping[str, Any], versions: Mapping[str, str]) -> str:
    digest = f" ({code['sha256'][:8]})" if "sha256" in code else ""
    if not code["commit"]:
        return f"{versions.get('hyperfl-flwr', 'unknown')}{digest}"
    return str(code["commit"])[:SHOWN] + (f"-dirty{digest}" if code["dirty"] else "")
