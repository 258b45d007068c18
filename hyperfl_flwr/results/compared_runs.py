"""The runs of a comparison, and which of them differ in their seeds only."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyperfl_flwr.config.table import neutral_keys
from hyperfl_flwr.core.errors import RunDirectoryError
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.methods import METHODS, method_sections
from hyperfl_flwr.results.same_clients import differing, division_of, have_as_many_samples
from hyperfl_flwr.runs.run_directory import read_manifest, settings_of, with_num_nodes
from hyperfl_flwr.runs.run_sources import method_of
from hyperfl_flwr.runs.summary import summarise

SEEDS = frozenset({"seed", "data.seed"})
"""Settings in which the runs of a group differ."""

SOURCES = {
    "method source": ("method", "method"),
    "network source": ("target", "model"),
    "data version": ("dataset", "data"),
}
"""Further setting of a run, the start of the SHA-256 of code or data of the user's own -> setting that names it, entry
of the manifest. Runs with another version of these are no seeds of one group."""

ANY = "any number"
"""Value of a setting that changes no result of a run, where it changes those of other runs (`neutral_keys`)."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run that is compared.

    Attributes:
        path: The run's folder.
        manifest: Its manifest.
        settings: Its settings, with numbers in place of `auto`; `SOURCES` are among them. `ANY` is the value of those
            that change no result of the run.
        sections: Keys of the sections of settings that belong to its method.
        summary: Its summary.
    """

    path: Path
    manifest: Mapping[str, Any]
    settings: Mapping[str, Scalar]
    sections: frozenset[str]
    summary: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> "Run":
        """Read a run's folder.

        Raises:
            RunDirectoryError: If it is not a run's folder, the run has no finished round, or its method is unknown.
        """
        manifest, method = read_manifest(path), method_of(path)
        try:
            summary = summarise(path)
        except ValueError as error:
            raise RunDirectoryError(f"{error}; wait for the first round before comparing it") from None
        sources = {key: str(manifest.get(entry, {}).get("sha256", ""))[:8] for key, (_, entry) in SOURCES.items()}
        sections = frozenset(kind.key for kind in METHODS[method].settings)
        settings = {**with_num_nodes(settings_of(path), manifest), **sources}
        settings |= dict.fromkeys(neutral_keys(settings), ANY)
        return cls(path=path, manifest=manifest, settings=settings, sections=sections, summary=summary)


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Read the folders of at least two different runs.

    Raises:
        RunDirectoryError: If a folder is not a run's, the run has no finished round, there are fewer than two, or two
            of them are one run: the same folder, or copies.
    """
    places = [path.resolve() for path in paths]
    if len(set(places)) < max(2, len(places)):
        given = ", ".join(map(str, paths))
        raise RunDirectoryError(f"a comparison needs the folders of at least two different runs; got {given}")
    runs = [Run.read(path) for path in places]
    known: dict[object, Path] = {}
    for run in runs:
        if (first := known.setdefault(run.manifest["experiment"], run.path)) != run.path:
            raise RunDirectoryError(
                f"{run.path} is a copy of {first}, and would count as another run; leave one of them out"
            )
    return runs


def differing_keys(runs: Sequence[Run]) -> list[str]:
    """Return the settings that distinguish some of the runs, but for their seeds."""
    known = dict.fromkeys(key for run in runs for key in run.settings)
    return [key for key in known if key not in SEEDS and _differ(key, runs)]


def _differ(key: str, runs: Sequence[Run]) -> bool:
    """Return whether a setting distinguishes runs; one of a method's section does so between its own runs only."""
    section = key.partition(".")[0]
    if key in SOURCES:  # only of equal names
        of_name = {(run.settings[SOURCES[key][0]], run.settings[key]) for run in runs}
        return len(of_name) > len({name for name, _ in of_name})
    if any(section in run.sections for run in runs) or section in {kind.key for kind in method_sections()}:
        runs = [run for run in runs if section in run.sections]
    return len({run.settings.get(key, "") for run in runs} - {ANY}) > 1


def have_same_clients(runs: Sequence[Run]) -> bool:
    """Return whether runs with equal seeds of the data have the same clients with the same test data."""
    if differing([division_of(run.settings, run.manifest) for run in runs]):
        return False
    # Of one seed of the data: the samples of named clients, too, may be divided anew by another one.
    first: dict[Scalar, Sequence[int | None] | None] = {}
    for run in runs:
        sizes = run.summary.get("test_examples_per_client")
        if not have_as_many_samples(first.setdefault(run.settings["data.seed"], sizes), sizes):
            return False
    return True
