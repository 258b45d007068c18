"""The metrics that clients report after training and evaluation."""

from typing import Literal

from flwr.app import ConfigScalar as Scalar

from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.tasks import TASKS, Task
from hyperfl_flwr.metrics.scores import Scores
from hyperfl_flwr.protocol.secure_sums.header import Phase

Kind = Literal["aggregate", "personalized", "kept"]
"""Kind of model that is evaluated: as received, after local training, or that which `keep = best` keeps."""


class ReportedMetrics:
    """Names of a method's metrics, which a secure step states before its clients report them."""

    @classmethod
    def metric_names(cls, config: RunConfig, phase: Phase, server_round: int) -> tuple[str, ...]:
        """Return the names of the metrics that every client reports, in the order of the sums of a secure step.

        Times and counts are left out: with secure sums, no node sends those of its clients. So are numbers that not
        every client has (the AUC of one class is not defined), those of the data (the share of the largest class), and
        those that follow from another: sums of the root mean square error and of its square, the loss, would tell both
        of two clients.

        Args:
            config: The run's settings.
            phase: `train` for the metrics of `BaseClient.fit`, `evaluate` for those of `BaseClient.evaluate`.
            server_round: The federated round, from 1.
        """
        everywhere, selects, task = config.data.global_test, config.selects_rounds, TASKS[config.task]
        aggregate = (*_summed_names("aggregate", task), *((validation_name("aggregate", task),) if selects else ()))
        if phase == "evaluate":
            return (
                *aggregate,
                *((global_name("aggregate", task),) if everywhere else ()),
                *((*_summed_names("kept", task), validation_name("kept", task)) if config.keep == "best" else ()),
            )
        last = everywhere and server_round == config.num_rounds
        return (
            *aggregate,
            *cls.training_metrics(config),
            *_summed_names("personalized", task),
            *((validation_name("personalized", task),) if selects else ()),
            *((global_name("personalized", task),) if last else ()),
        )

    @classmethod
    def training_metrics(cls, config: RunConfig) -> tuple[str, ...]:
        """Return the names of the metrics that `BaseClient.train` returns in every round; by default `train-loss`."""
        return ("train-loss",)


def score_names(kind: Kind, task: Task) -> tuple[str, ...]:
    """Return the names of the numbers that every evaluation of a kind of model has."""
    return tuple(_name(f"{kind}-{each}") for each in (task.score, "loss", *task.scores))


def _summed_names(kind: Kind, task: Task) -> tuple[str, ...]:
    """Return those of `score_names` of which secure sums are formed."""
    left_out = {_name(f"{kind}-{each}") for each in task.of_loss}
    return tuple(name for name in score_names(kind, task) if name not in left_out)


def validation_name(kind: Kind, task: Task) -> str:
    """Return the name of the number of a kind of model on validation data by which rounds are decided about."""
    return f"{kind}-validation-{task.deciding}"


def global_name(kind: Kind, task: Task) -> str:
    """Return the name of the main score of a kind of model on all test data of the data set."""
    return f"{kind}-global-{task.score}"


def backdoor_name(kind: Kind) -> str:
    """Return the name of the share of test samples that a kind of model takes for the target class of a backdoor."""
    return f"{kind}-backdoor-success"


def score_metrics(kind: Kind, scores: Scores) -> dict[str, Scalar]:
    """Return the numbers of an evaluation that leave the client, none of them about a single class.

    Args:
        kind: Kind of model.
        scores: Its predictions for the client's test data.
    """
    task = scores.task
    values = (scores.score, scores.mean_loss, *map(scores.value, task.scores))
    return {
        **dict(zip(score_names(kind, task), values, strict=True)),
        **{_name(f"{kind}-{each}"): scores.value(each) for each in task.partial_scores},
        **({"majority-share": scores.value("majority_share")} if task.has_shares else {}),
        "test-examples": float(scores.total),
    }


def _name(record_name: str) -> str:
    """Return the name in messages of a number of the records."""
    return record_name.replace("_", "-")
