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

from hyperfl_flwr.core.errors import RunDirectoryError
from hyperfl_flwr.core.packages.code_version import code_versions
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.core.tasks import Task, task_of
from hyperfl_flwr.results.compared_runs import Run, differing_keys, have_same_clients, read_runs
from hyperfl_flwr.results.differences import Client, Difference, Scores, Seeds, Spread, numbers_of, scores_of
from hyperfl_flwr.results.same_clients import have_own_data, namespace, numbers_text
from hyperfl_flwr.runs.failures import nobody_text
from hyperfl_flwr.runs.run_directory import has_secure_sums
from hyperfl_flwr.runs.summary_texts import fall_text, majority_text
from hyperfl_flwr.runs.validation import replaces_test_data

LOCAL = "local"
"""The method that the others are compared with: training alone, which sends nothing."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Runs that differ in their seeds and their machine only.

    Attributes:
        label: The method, with the settings that distinguish the group from others of the method.
        runs: The runs.
        numbers: Each of `numbers_of` the task, over the runs.
        reference: Label of the group that it is compared with: of those with the same clients the best one of local
            training if there is any, else the first. It can be the group itself.
        difference: From the reference group; None for the reference itself, and if single clients are not known.
    """

    label: str
    runs: Sequence[Run]
    numbers: Mapping[str, Spread]
    reference: str
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
        differing: Each setting that differs between groups, with the value of each group.
        task: What all runs predict.
        notes: What a reader must know before drawing conclusions.
    """

    groups: Sequence[Group]
    differing: Mapping[str, Sequence[Scalar]]
    task: Task
    notes: Sequence[str]

    @property
    def references(self) -> list[str]:
        """The labels of the groups that others are compared with."""
        return list(dict.fromkeys(group.reference for group in self.groups if group.reference != group.label))

    @property
    def answers(self) -> list[str]:
        """Whether federation helped: a sentence for each group, the best first; none without local training."""
        alone = {group.label for group in self.groups if group.method == LOCAL}
        if not alone:
            return []
        found = {
            group.label: group.difference if group.reference in alone else None
            for group in self.groups
            if group.method != LOCAL
        }
        best_first = sorted(found.items(), key=lambda item: item[1].mean if item[1] else -math.inf, reverse=True)
        return [_answer(label, difference, self.task) for label, difference in best_first]

    def entry(self) -> dict[str, Any]:
        """Return the comparison as JSON."""
        return {
            "answers": self.answers,
            "differing_settings": {key: list(values) for key, values in self.differing.items()},
            "groups": [
                {
                    "label": group.label,
                    "runs": [str(run.path) for run in group.runs],
                    **{name: vars(spread) for name, spread in group.numbers.items()},
                    "reference": group.reference,
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
        RunDirectoryError: If a folder is not a run's or is given twice, runs are copies of each other, there are fewer
            than two, or their tasks differ.
    """
    runs = read_runs(paths)
    if len(tasks := {task_of(run.settings) for run in runs}) > 1:
        names = ", ".join(sorted(task.name for task in tasks))
        raise RunDirectoryError(f"runs of different tasks cannot be compared; got {names}")
    (task,) = tasks
    keys = differing_keys(runs)
    by_values: dict[tuple[Scalar, ...], list[Run]] = {}
    for run in runs:
        by_values.setdefault(tuple(run.settings.get(key, "") for key in keys), []).append(run)
    labels, members = _labels(keys, list(by_values), runs[0]), list(by_values.values())
    numbers, scores = [_numbers(found, task) for found in members], [_scores(found, task) for found in members]
    references = _references(members, numbers, task)
    groups = [
        Group(
            label=labels[place],
            runs=members[place],
            numbers=numbers[place],
            reference=labels[reference],
            difference=None if place == reference else Difference.of(scores[place], scores[reference]),
        )
        for place, reference in enumerate(references)
    ]
    return Comparison(
        groups=groups,
        differing={key: [values[place] for values in by_values] for place, key in enumerate(keys)},
        task=task,
        notes=_notes(groups),
    )


def _references(groups: Sequence[Sequence[Run]], numbers: Sequence[Mapping[str, Spread]], task: Task) -> list[int]:
    """Return for each group the place of the one that it is compared with, which has the same clients."""
    divisions: list[list[int]] = []
    for place, runs in enumerate(groups):
        same = (places for places in divisions if have_same_clients([*groups[places[0]], *runs]))
        if (places := next(same, None)) is None:
            divisions.append(places := [])
        places.append(place)
    found: dict[int, int] = {}
    for places in divisions:
        alone = [place for place in places if groups[place][0].settings["method"] == LOCAL]
        means = {place: numbers[place][task.key("test_accuracy")].mean for place in alone}
        known = {place: mean for place, mean in means.items() if mean is not None}
        reference = max(known, key=lambda place: known[place], default=(alone or places)[0])
        found |= dict.fromkeys(places, reference)
    return [found[place] for place in range(len(groups))]


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
    return {name: Spread.of([run.summary.get(name) for run in runs]) for name in numbers_of(task)}


def _scores(runs: Sequence[Run], task: Task) -> Scores:
    """Return each client's personalized score with each seed, the mean over the runs that have it."""
    found: dict[tuple[Seeds, Client], list[float]] = {}
    for run in runs:
        seeds, kind = (run.settings["seed"], run.settings["data.seed"]), namespace(run.settings, run.manifest)
        for place, score in scores_of(run.summary, task.key("test_accuracy"), seeds, kind).items():
            found.setdefault(place, []).append(score)
    return {place: statistics.fmean(scores) for place, scores in found.items()}


def _answer(label: str, found: Difference | None, task: Task) -> str:
    if found is None:
        return f"{label}: not known, as its clients cannot be paired with those of local training."
    size = f"{abs(100 * found.mean):.1f} points" if task.has_shares else f"{task.score_title} {abs(found.mean):.3f}"
    more = f"{size} {'above' if found.mean >= 0 else 'below'} training alone"
    if found.low is None or found.high is None:
        return f"{label}: {more} for a single client, which allows no conclusion."
    verdict = "yes" if found.low > 0 else "no" if found.high < 0 else "not measurably"
    interval = f"95 % interval {task.difference(found.low)} to {task.difference(found.high)}"
    return (
        f"{label}: {verdict}, {more} ({interval}; of {found.clients} clients, {found.better} better and "
        f"{found.worse} worse)."
    )


def _notes(groups: Sequence[Group]) -> list[str]:
    runs = [run for group in groups for run in group.runs]
    common = os.path.commonpath([run.path.parent for run in runs])
    names = {run.path: run.path.relative_to(common).as_posix() for run in runs}
    score = task_of(runs[0].settings).key("test_accuracy_num_clients")
    counts = {names[run.path]: (run.summary[score], run.summary["num_clients"]) for run in runs}
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
    if text := numbers_text(counts):
        notes.append(text)
    if any(have_own_data(run.manifest) for run in runs):
        notes.append(
            "Nodes have data of their own: clients with equal numbers count as the same ones if they have as many test "
            "samples. Whether these are the same samples is not known."
        )
    notes += [f"{names[run.path]}: {text}." for run in runs if (text := nobody_text(run.path))]
    for found in (majority_text, fall_text):
        notes += [f"{names[run.path]}: {text}." for run in runs if (text := found(run.summary))]
    notes += _pairing_notes(groups)
    if len(versions := dict.fromkeys(version for run in runs for version in code_versions(run.manifest))) > 1:
        notes.append(f"The runs are of {len(versions)} versions of this project: {', '.join(versions)}.")
    return notes


def _pairing_notes(groups: Sequence[Group]) -> list[str]:
    """Return who is compared with whom, and what the intervals of the differences cover."""
    notes = []
    if any(has_secure_sums(run.manifest) for group in groups for run in group.runs):
        notes.append("Numbers of single clients are not known of runs with secure sums; their clients are not paired.")
    elif any(group.difference is None and group.reference != group.label for group in groups):
        notes.append("Clients are paired only where two rows have the same seeds of the data.")
    if len(references := dict.fromkeys(group.reference for group in groups)) > 1:
        notes.append("Clients are paired only where two rows divide the same data in the same way.")
        for reference in references:
            if others := [group.label for group in groups if group.reference == reference != group.label]:
                notes.append(f"Compared with {reference}: {'; '.join(others)}.")
    if any(group.difference is not None and group.difference.seeds == 1 for group in groups):
        notes.append(
            "Intervals of one seed, or between rows with different seeds, are over clients, and not over other seeds."
        )
    seeds = [[(run.settings["seed"], run.settings["data.seed"]) for run in group.runs] for group in groups]
    if again := [group.label for group, pairs in zip(groups, seeds, strict=True) if len(set(pairs)) < len(pairs)]:
        notes.append(
            f"Several runs have the same seeds: {'; '.join(again)}. Their mean is one seed's value in the intervals."
        )
    return notes
