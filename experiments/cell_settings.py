"""Tell whether a finished run is that of a study's cell: compare their settings, without those of the machine."""

from collections.abc import Mapping
from typing import Any

from experiments.study import Cell, Study
from hyperfl_flwr.app.resolved import resolved
from hyperfl_flwr.config.table import neutral_keys, with_defaults
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.launch.node_numbers import one_node_per_client
from hyperfl_flwr.models.provenance import body_hash, changed_sources, recorded_body
from hyperfl_flwr.runs.failures import has_diverged
from hyperfl_flwr.runs.run_directory import trained_settings, with_num_nodes

LIMITS = frozenset({"failure-budget", "max-failed-rounds"})
"""Settings that decide whether a run fails, and change no other result."""


def without_machine_settings(
    settings: Mapping[str, Scalar], cell: Cell | None = None, *, has_failed: bool = False
) -> dict[str, Scalar]:
    """Return settings without those of the machine, which do not change the results, in the order of their names.

    Those of novel clients stay: a resumed run may change them, but not the numbers that a table shows.

    Args:
        settings: The settings.
        cell: The cell whose results count; None for those of a run with these settings.
        has_failed: Whether the result is that the run has failed, which `LIMITS` decide.
    """
    neutral = neutral_keys(settings if cell is None else cell.settings) - (LIMITS if has_failed else set())
    return {key: value for key, value in sorted(settings.items()) if key not in neutral or key.startswith("novel.")}


def changes_of(study: Study | None, changes: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Return changes of a study's settings without those of the machine, for any choice of its rows.

    Args:
        study: The study; None where `num-nodes` is none of the changes.
        changes: The changes.
    """
    kept = without_machine_settings(changes)
    if study is None or "num-nodes" not in changes:
        return kept
    lines = (*study.rows, *study.columns)
    given = [study.settings, study.quick, *(line.settings for line in lines)]
    given += [settings for line in lines for settings in line.on.values()]
    matters = any("num-nodes" not in neutral_keys({**settings, **changes}) for settings in given)
    return dict(sorted({**kept, **({"num-nodes": changes["num-nodes"]} if matters else {})}.items()))


def differences(cell: Cell, manifest: Mapping[str, Any]) -> list[str]:
    """Return the differences between the settings and sources of a run and of a cell, without the machine's settings.

    A setting that did not exist when the run was made counts as its default. Sources are the user's own code, and the
    weights of a pre-trained body.
    """
    # A run may record a setting as given (`auto`) or as resolved: both are equal to the cell's.
    found_settings = with_num_nodes(with_defaults(trained_settings(manifest)), manifest)
    given, expected, recorded = (
        without_machine_settings(settings, cell, has_failed=has_diverged(manifest))
        for settings in (cell.settings, _with_num_nodes(cell) | cell.attack, found_settings)
    )
    differing = [
        key for key in sorted({*expected, *recorded}) if recorded.get(key) not in (given.get(key), expected.get(key))
    ]
    found = [f"{key} {recorded.get(key)!r} instead of {expected.get(key)!r}" for key in differing]
    return found + changed_sources(manifest, cell.settings) + _other_weights(cell, manifest)


def _other_weights(cell: Cell, manifest: Mapping[str, Any]) -> list[str]:
    """Return that a run's pre-trained body has other weights than the file that the cell names, if it names one."""
    before, file = recorded_body(manifest), cell.config.lpm.weights
    if not before or file == "auto" or (now := body_hash(cell.config.target, file)) == before:
        return []
    return [f"weights {before[:12]} of {cell.config.target} instead of {now[:12]}"]


def _with_num_nodes(cell: Cell) -> dict[str, Scalar]:
    """Return a cell's resolved settings; where `num-nodes` changes the results, `auto` is a node for each client."""
    settings = resolved(cell.config).flat()
    return settings | ({"num-nodes": one_node_per_client(cell.config)} if cell.config.num_nodes == "auto" else {})
