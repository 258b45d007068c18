"""Assemble and check a run's settings, as far as possible without data and nodes."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hyperfl_flwr.app.methods import client_of
from hyperfl_flwr.app.resolved import resolved
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.config.table import default_settings, training_autos, with_defaults
from hyperfl_flwr.core.errors import ConfigError, InstallationError, RunDirectoryError
from hyperfl_flwr.core.files.toml_files import app_file, flatten
from hyperfl_flwr.core.packages.user_code import is_user_code
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.data.sample_format import refuse_absent
from hyperfl_flwr.methods import METHODS, method_sections
from hyperfl_flwr.models.provenance import find_sources, refuse_changed_sources, use_weights
from hyperfl_flwr.runs.resume import resume_round
from hyperfl_flwr.runs.run_directory import (
    DEPLOYMENT,
    RunDirectory,
    new_run_name,
    read_manifest,
    refuse_used_directory,
    settings_of,
)
from hyperfl_flwr.runs.summary import is_record


def requested(changes: Mapping[str, Scalar], *, deployed: bool = False) -> RunConfig:
    """Assemble and check the settings of a run, with the absolute path of its output folder.

    Args:
        changes: Settings that differ from the defaults or, if `resume` is one of them, from the resumed run's.
        deployed: Whether the run is for a deployment, where the nodes' owners may name other data.

    Raises:
        HyperFLError: If settings are wrong (all problems are listed), or the folder is in use.
    """
    _refuse_old_table()
    resume = str(changes.get("resume", ""))
    if resume and changes.get("output"):
        raise ConfigError("a resumed run continues in its own folder; give resume or output, not both")
    if resume:
        settings = _settings_to_resume(Path(resume), changes) | dict(changes)
    else:
        find_sources(changes)
        settings = with_defaults(changes)
    if not settings["output"] and not resume:
        data = DEPLOYMENT if deployed else str(settings["dataset"])
        name = new_run_name(str(settings["method"]), data, int(settings["seed"] or 0))
        settings["output"] = str(Path.cwd() / "runs" / name)
    config = RunConfig.from_flat(settings)
    if config.personalize.run:
        raise ConfigError("personalize.run must not be set for training; use `hyperfl personalize`")
    if not resume:
        refuse_used_directory(Path(config.output))
        if not deployed:  # the data of a deployment are on the nodes' machines
            refuse_absent(config.dataset)
    use_weights(config.lpm.weights)
    return config


def without_effect(changes: Mapping[str, Scalar], method: str) -> list[str]:
    """Return a warning for each changed setting that belongs to other methods only, and for an epsilon of 0.

    Args:
        changes: Settings that differ from the defaults.
        method: The run's method.
    """
    used = {kind.key for kind in METHODS[method].settings}
    others = {kind.key for kind in method_sections()} - used
    found = [
        f"{key} has no effect on {method}; it is a setting of {', '.join(_users(section))}"
        for key in sorted(changes)
        if (section := key.partition(".")[0]) in others and "." in key
    ]
    if "dp.epsilon" in changes and not changes["dp.epsilon"]:
        found.append("dp.epsilon = 0 switches differential privacy off; for noisy steps, set a value above 0")
    return found


def _users(section: str) -> list[str]:
    return [name for name, row in METHODS.items() if section in {kind.key for kind in row.settings}]


def _refuse_old_table() -> None:
    """Refuse a pyproject.toml without the settings of a new method: Flower takes the settings' names from its table."""
    table = tomllib.loads(app_file("pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    if missing := sorted(set(default_settings()) - set(flatten(table))):
        raise InstallationError(f"pyproject.toml lacks the settings {', '.join(missing)}; run `make generate`")


def _settings_to_resume(run: Path, changes: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Return the settings of a run to resume; an `auto` that resolves to another value now keeps its old value."""
    recorded = read_manifest(run)["settings"]
    before, now = str(recorded.get("method", "")), str(changes.get("method", recorded.get("method", "")))
    if before != now and (is_user_code(before) or is_user_code(now)):  # which have other settings
        raise RunDirectoryError(f"a resumed run must keep its method, {before}, got {now}; start a new run, or revert")
    find_sources(recorded | changes, run)
    given = default_settings(str(recorded.get("method", "")))
    given |= {key: value for key, value in recorded.items() if key in given}
    trained, in_use = settings_of(run), resolved(RunConfig.from_flat({**given, **changes})).flat()
    autos = training_autos(str(given["method"]))
    changed = {key for key in autos if given[key] == "auto" and trained[key] not in ("auto", in_use[key])}
    return given | {key: trained[key] for key in changed}


def check_resume(config: RunConfig) -> dict[str, Any]:
    """Check that a run can be resumed with these settings, and return its manifest.

    Raises:
        HyperFLError: If it cannot be resumed.
    """
    path = Path(config.resume)
    manifest = read_manifest(path)
    if is_record(manifest):
        raise RunDirectoryError(f"{path} was restored from a record and has no state to go on from; start a new run")
    refuse_changed_sources(manifest, config.flat())
    RunDirectory(path).close()  # raises if another process is writing there
    resume_round(config, resolved(config), keeps_state=client_of(config.method).keeps_state(config))
    return manifest
