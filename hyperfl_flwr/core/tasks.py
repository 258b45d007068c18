"""Tasks of the clients' networks: what they predict, and the numbers that say how well.

A task is a row of `TASKS`. Its main score is largest for the best model; it decides about rounds, and tables show it
first. The loss of a task is in `hyperfl_flwr.models.losses`, the computation of its scores in `hyperfl_flwr.metrics`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

TaskName = Literal["classification", "multi-label", "regression"]


@dataclass(frozen=True, kw_only=True)
class Task:
    """What the clients' networks predict.

    Attributes:
        name: Value of the setting `task`.
        title: Description in one line.
        output: Word for one of the K numbers that a network returns for a sample.
        outputs: The same for several.
        score: Name of the main score in records, such as `accuracy` in `personalized_accuracy`.
        score_title: The main score for people.
        lowest: Smallest possible main score; the largest is 1.
        scores: Names in records of the other scores that every evaluation has.
        of_loss: Those of them that follow from the loss. Secure sums leave them out: both sums would tell too much.
        partial_scores: The same of scores that are not defined for all test data.
        score_titles: All these other scores for people, in the same order.
        deciding: Name in records of the number on validation data that decides about rounds: the main score, or one
            that is defined for a single sample, too.
        deciding_title: That number for people.
        decides_by_least: Whether the smallest of these numbers is the best.
        has_shares: Whether all scores are shares in [0, 1], which are shown in percent.
        loss_unit: Unit of the loss.
    """

    name: TaskName
    title: str
    output: str
    outputs: str
    score: str
    score_title: str
    lowest: float
    scores: tuple[str, ...]
    of_loss: tuple[str, ...] = ()
    partial_scores: tuple[str, ...]
    score_titles: tuple[str, ...]
    deciding: str
    deciding_title: str
    decides_by_least: bool
    has_shares: bool
    loss_unit: str

    @property
    def all_scores(self) -> tuple[str, ...]:
        """Names in records of all scores but the main one."""
        return (*self.scores, *self.partial_scores)

    def counted(self, number: int) -> str:
        """Return a number of outputs for people, such as `10 classes` or `1 target`."""
        return f"{number} {self.outputs if number != 1 else self.output}"

    def merit(self, deciding: float) -> float:
        """Return a number that is the larger, the better a model is, from its deciding number on validation data."""
        return -deciding if self.decides_by_least else deciding

    def key(self, name: str) -> str:
        """Return the name in records of a number that has the main score of classification in its name."""
        return name.replace("accuracy", self.score)

    def text(self, value: float, digits: int = 2) -> str:
        """Return a score for people: a share in percent, another number with two digits more than a percentage."""
        return f"{100 * value:.{digits}f} %" if self.has_shares else f"{value:.{digits + 2}f}"

    def difference(self, value: float) -> str:
        """Return a difference of main scores for people: points of a percentage, or a number, with its sign."""
        return f"{100 * value:+.1f}" if self.has_shares else f"{value:+.3f}"


CLASSIFICATION = Task(
    name="classification",
    title="one of K classes for each sample",
    output="class",
    outputs="classes",
    score="accuracy",
    score_title="accuracy",
    lowest=0.0,
    scores=("balanced_accuracy", "macro_f1"),
    partial_scores=("auc",),
    score_titles=("balanced accuracy (mean recall of the classes)", "macro F1", "AUC"),
    deciding="accuracy",
    deciding_title="accuracy",
    decides_by_least=False,
    has_shares=True,
    loss_unit="nats",
)

MULTI_LABEL = Task(
    name="multi-label",
    title="for each of K labels whether a sample has it",
    output="label",
    outputs="labels",
    score="accuracy",
    score_title="accuracy",
    lowest=0.0,
    scores=("balanced_accuracy",),
    partial_scores=("macro_f1", "auc"),  # a client may have no sample with a label
    score_titles=("balanced accuracy (mean of sensitivity and specificity)", "macro F1", "AUC"),
    deciding="accuracy",
    deciding_title="accuracy",
    decides_by_least=False,
    has_shares=True,
    loss_unit="nats per label",
)

REGRESSION = Task(
    name="regression",
    title="K numbers for each sample",
    output="target",
    outputs="targets",
    score="r2",
    score_title="R²",
    lowest=-1.0,
    scores=("rmse", "mae"),
    of_loss=("rmse",),
    partial_scores=(),
    score_titles=("root mean square error", "mean absolute error"),
    deciding="mse",  # R² of one sample is 0 for all models
    deciding_title="mean squared error",
    decides_by_least=True,
    has_shares=False,
    loss_unit="squared units of data.target-scale",
)

TASKS: dict[str, Task] = {task.name: task for task in (CLASSIFICATION, MULTI_LABEL, REGRESSION)}
"""All tasks by name."""

ALL_TASKS = tuple(TASKS)
"""Names of all tasks, for methods that only need the loss."""

MAIN_SCORES = tuple(dict.fromkeys(task.score for task in TASKS.values()))
"""Names of the main scores of all tasks."""

NO_CLASS = -1
"""Stands for the predicted class where a model's outputs are not numbers; it is wrong for every sample."""


def class_name(number: int, classes: Sequence[str]) -> str:
    """Return the name of a predicted class for people."""
    return "no class" if number == NO_CLASS else classes[number]


def task_of(settings: Mapping[str, Any]) -> Task:
    """Return the task of a run by its settings; runs of earlier versions have none and are of classification."""
    return TASKS[settings.get("task", CLASSIFICATION.name)]
