"""Compare runs: group those that differ in their seeds only, and pair their clients.

Two runs have the same clients if they divide the same data in the same way. Then a difference between methods is one
between the same clients, whose interval is narrower than that of two separate means.
"""

import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyperfl_flwr.config.table import neutral_keys
from hyperfl_flwr.core.errors import RunDirectoryError
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.core.tasks import Task, task_of
from hyperfl_flwr.methods import METHODS, method_sections
from hyperfl_flwr.results.differences import Client, Difference, Scores, Seeds, Spread, numbers_of, scores_of
from hyperfl_flwr.results.same_clients import differing, division_of, namespace, numbers_text
from hyperfl_flwr.runs.run_directory import has_secure_sums, read_manifest, settings_of, with_num_nodes
from hyperfl_flwr.runs.run_sources import method_of
from hyperfl_flwr.runs.summary import summarise
from hyperfl_flwr.runs.summary_texts import fall_text, majority_text
from hyperfl_flwr.runs.validation import replaces_test_data

LOCAL = "local"
"""The method that the others are compared with: training alone, which sends nothing."""

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


@dataclass(frozen=True, kw_only=True)
class Group:
    """Runs that differ in their seeds and their machine only.

    Attributes:
        label: The method, with the settings that distinguish the group from others of the method.
        runs: The runs.
        numbers: Each of `numbers_of` the task, over the runs.
        difference: From the reference group; None for the reference itself, and where no clients can be paired.
    """

    label: str
    runs: Sequence[Run]
    numbers: Mapping[str, Spread]
    difference: Difference | None

    @property
    def method(self) -> str:
        """The method of the runs."""
        return str(self.runs[0].settings["method"])


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Groups of runs, and what differs between them.

    Attributes:
        groups: The groups, in the order of their first runs.
        reference: The group that the others are compared with: the best one of local training if there is any, else the
            first.
        differing: Each setting that differs between groups, with the value of each group.
        task: What all runs predict.
        notes: What a reader must know before drawing conclusions.
    """

    groups: Sequence[Group]
    reference: Group
    differing: Mapping[str, Sequence[Scalar]]
    task: Task
    notes: Sequence[str]

    @property
    def answers(self) -> list[str]:
        """Whether federation helped: a sentence for each group, the best first; none without local training."""
        if self.reference.method != LOCAL:
            return []
        others = [group for group in self.groups if group.method != LOCAL]
        others.sort(key=lambda group: group.difference.mean if group.difference else -math.inf, reverse=True)
        return [_answer(group, self.task) for group in others]

    def entry(self) -> dict[str, Any]:
        """Return the comparison as JSON."""
        return {
            "answers": self.answers,
            "reference": self.reference.label,
            "differing_settings": {key: list(values) for key, values in self.differing.items()},
            "groups": [
                {
                    "label": group.label,
                    "runs": [str(run.path) for run in group.runs],
                    **{name: vars(spread) for name, spread in group.numbers.items()},
                    "difference": None if group.difference is None else vars(group.difference),
                }
                for group in self.groups
            ],
            "notes": list(self.notes),
        }


def compare(paths: Sequence[Path]) -> Comparison:
    """Compare runs.

    Args:
        paths: Folders of at least two runs, each with a finished round.

    Raises:
        RunDirectoryError: If a folder is not a run's or is given twice, there are fewer than two, or their tasks
            differ.
    """
    places = [path.resolve() for path in paths]
    if len(set(places)) < max(2, len(places)):
        raise RunDirectoryError(f"a comparison needs at least two different runs; got {', '.join(map(str, paths))}")
    runs = [Run.read(path) for path in places]
    if len(tasks := {task_of(run.settings) for run in runs}) > 1:
        names = ", ".join(sorted(task.name for task in tasks))
        raise RunDirectoryError(f"runs of different tasks cannot be compared; got {names}")
    (task,) = tasks
    known = dict.fromkeys(key for run in runs for key in run.settings)
    keys = [key for key in known if key not in SEEDS and _differ(key, runs)]
    by_values: dict[tuple[Scalar, ...], list[Run]] = {}
    for run in runs:
        by_values.setdefault(tuple(run.settings.get(key, "") for key in keys), []).append(run)
    labels = _labels(keys, list(by_values), runs[0])
    numbers = [_numbers(found, task) for found in by_values.values()]
    reference = _reference(list(by_values.values()), numbers, task)
    ours = [_scores(found, task) for found in by_values.values()]
    groups = [
        Group(
            label=label,
            runs=found,
            numbers=numbers[place],
            difference=None
            if place == reference or not _have_same_clients([*found, *list(by_values.values())[reference]])
            else Difference.of(ours[place], ours[reference]),
        )
        for place, (label, found) in enumerate(zip(labels, by_values.values(), strict=True))
    ]
    return Comparison(
        groups=groups,
        reference=groups[reference],
        differing={key: [values[place] for values in by_values] for place, key in enumerate(keys)},
        task=task,
        notes=_notes(groups, groups[reference]),
    )


def _differ(key: str, runs: Sequence[Run]) -> bool:
    """Return whether a setting distinguishes runs; one of a method's section does so between its own runs only."""
    section = key.partition(".")[0]
    if key in SOURCES:  # only of equal names
        of_name = {(run.settings[SOURCES[key][0]], run.settings[key]) for run in runs}
        return len(of_name) > len({name for name, _ in of_name})
    if any(section in run.sections for run in runs) or section in {kind.key for kind in method_sections()}:
        runs = [run for run in runs if section in run.sections]
    return len({run.settings.get(key, "") for run in runs} - {ANY}) > 1


def _reference(groups: Sequence[Sequence[Run]], numbers: Sequence[Mapping[str, Spread]], task: Task) -> int:
    """Return the place of the best group of local training, or 0 if there is none."""
    alone = [place for place, runs in enumerate(groups) if runs[0].settings["method"] == LOCAL]
    means = {place: numbers[place][task.key("test_accuracy")].mean for place in alone}
    known = {place: mean for place, mean in means.items() if mean is not None}
    return max(known, key=lambda place: known[place], default=alone[0] if alone else 0)


def _labels(keys: Sequence[str], groups: Sequence[tuple[Scalar, ...]], first: Run) -> list[str]:
    """Return the groups' labels: the method, and the settings that differ between groups of one method."""
    at = keys.index("method") if "method" in keys else None
    methods = [str(first.settings["method"] if at is None else values[at]) for values in groups]
    labels = []
    for method, values in zip(methods, groups, strict=True):
        same = [other for other, name in zip(groups, methods, strict=True) if name == method]
        own = [
            f"{key}={value}"
            for place, (key, value) in enumerate(zip(keys, values, strict=True))
            if len({other[place] for other in same}) > 1
        ]
        labels.append(", ".join([method, *own]))
    return labels


def _numbers(runs: Sequence[Run], task: Task) -> dict[str, Spread]:
    return {name: Spread.of([run.summary[name] for run in runs]) for name in numbers_of(task)}


def _scores(runs: Sequence[Run], task: Task) -> Scores:
    """Return each client's personalized score with each seed, the mean over the runs that have it."""
    found: dict[tuple[Seeds, Client], list[float]] = {}
    for run in runs:
        seeds = run.settings["seed"], run.settings["data.seed"]
        for place, score in scores_of(run.summary, task.key("test_accuracy"), seeds, namespace(run.settings)).items():
            found.setdefault(place, []).append(score)
    return {place: statistics.fmean(scores) for place, scores in found.items()}


def _have_same_clients(runs: Sequence[Run]) -> bool:
    """Return whether runs with equal seeds of the data have the same clients with the same test data."""
    return not differing([division_of(run.settings, run.manifest) for run in runs])


def _answer(group: Group, task: Task) -> str:
    found = group.difference
    if found is None:
        return f"{group.label}: not known, as its clients cannot be paired with those of local training."
    size = f"{abs(100 * found.mean):.1f} points" if task.has_shares else f"{task.score_title} {abs(found.mean):.3f}"
    more = f"{size} {'above' if found.mean >= 0 else 'below'} training alone"
    if found.low is None or found.high is None:
        return f"{group.label}: {more} for a single client, which allows no conclusion."
    verdict = "yes" if found.low > 0 else "no" if found.high < 0 else "not measurably"
    interval = f"95 % interval {task.difference(found.low)} to {task.difference(found.high)}"
    return (
        f"{group.label}: {verdict}, {more} ({interval}; of {found.clients} clients, {found.better} better and "
        f"{found.worse} worse)."
    )


def _notes(groups: Sequence[Group], reference: Group) -> list[str]:
    runs = [run for group in groups for run in group.runs]
    common = os.path.commonpath([run.path.parent for run in runs])
    names = {run.path: run.path.relative_to(common).as_posix() for run in runs}
    counts = {names[run.path]: run.summary[task_of(run.settings).key("test_accuracy_num_clients")] for run in runs}
    notes = []
    if len({run.settings["dataset"] for run in runs}) > 1:
        notes.append("The runs are on different data sets.")
    if of_validation := [names[run.path] for run in runs if replaces_test_data(run.settings)]:
        notes.append(
            f"Scores of validation data, not of test data (data.validation-fraction): {', '.join(of_validation)}."
        )
    if unfinished := [names[run.path] for run in runs if run.manifest["status"] != "completed"]:
        notes.append(f"Not complete: {', '.join(unfinished)}.")
    if len({run.summary["rounds"] for run in runs}) > 1:
        notes.append("The runs have different numbers of rounds.")
    if len({run.settings["num-clients"] for run in runs}) == 1 and (text := numbers_text(counts)):
        notes.append(text)
    for found in (majority_text, fall_text):
        notes += [f"{names[run.path]}: {text}." for run in runs if (text := found(run.summary))]
    if any(has_secure_sums(run.manifest) for run in runs):
        notes.append("Numbers of single clients are not known of runs with secure sums; their clients are not paired.")
    elif any(group.difference is None for group in groups if group is not reference):
        notes.append("Clients are paired only where two groups divide the same data in the same way.")
    if any(group.difference is not None and group.difference.seeds == 1 for group in groups):
        notes.append(
            "Intervals of one seed, or between rows with different seeds, are over clients, and not over other seeds."
        )
    if len(commits := {str(run.manifest["code"]["commit"]) for run in runs}) > 1:
        notes.append(f"The runs are of {len(commits)} commits of this project.")
    return notes
