"""The metrics that clients report after training and evaluation."""

from typing import Literal

from flwr.app import ConfigScalar as Scalar

from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.metrics.classification import Scores
from hyperfl_flwr.protocol.secure_sums.header import Phase

Kind = Literal["aggregate", "personalized"]
"""Kind of model that is evaluated: as received, or after local training."""


class ReportedMetrics:
    """Names of a method's metrics, which a secure step states before its clients report them."""

    @classmethod
    def metric_names(cls, config: RunConfig, phase: Phase, server_round: int) -> tuple[str, ...]:
        """Return the names of the metrics that every client reports, in the order of the sums of a secure step.

        Times and counts are left out: with secure sums, no node sends those of its clients. So are numbers that not
        every client has (the AUC of one class is not defined), and those of the data (the share of the largest class).

        Args:
            config: The run's settings.
            phase: `train` for the metrics of `BaseClient.fit`, `evaluate` for those of `BaseClient.evaluate`.
            server_round: The federated round, from 1.
        """
        everywhere = config.data.global_test
        if phase == "evaluate":
            return (*score_names("aggregate"), *(("aggregate-global-accuracy",) if everywhere else ()))
        last = everywhere and server_round == config.num_rounds
        return (
            *score_names("aggregate"),
            *cls.training_metrics(config),
            *score_names("personalized"),
            *(("personalized-global-accuracy",) if last else ()),
        )

    @classmethod
    def training_metrics(cls, config: RunConfig) -> tuple[str, ...]:
        """Return the names of the metrics that `BaseClient.train` returns in every round; by default `train-loss`."""
        return ("train-loss",)


def score_names(kind: Kind) -> tuple[str, ...]:
    """Return the names of the numbers that every evaluation of a kind of model has, `aggregate` or `personalized`."""
    return f"{kind}-accuracy", f"{kind}-loss", f"{kind}-balanced-accuracy", f"{kind}-macro-f1"


def score_metrics(kind: Kind, scores: Scores) -> dict[str, Scalar]:
    """Return the numbers of an evaluation that leave the client, none of them about a single class.

    Args:
        kind: Kind of model, `aggregate` or `personalized`.
        scores: Its predictions for the client's test data.
    """
    values = (scores.accuracy, scores.mean_loss, scores.balanced_accuracy, scores.macro_f1)
    return {
        **dict(zip(score_names(kind), values, strict=True)),
        f"{kind}-auc": scores.auc,
        "majority-share": scores.majority_share,
        "test-examples": float(scores.total),
    }
