"""The metrics that clients report after training and evaluation."""

from typing import Literal

from flwr.app import ConfigScalar as Scalar

from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.metrics.classification import Scores
from hyperfl_flwr.protocol.secure_sums.header import Phase

Kind = Literal["aggregate", "personalized", "kept"]
"""Kind of model that is evaluated: as received, after local training, or that which `keep = best` keeps."""


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
        everywhere, selects = config.data.global_test, config.selects_rounds
        aggregate = (*score_names("aggregate"), *((validation_name("aggregate"),) if selects else ()))
        if phase == "evaluate":
            return (
                *aggregate,
                *(("aggregate-global-accuracy",) if everywhere else ()),
                *((*score_names("kept"), validation_name("kept")) if config.keep == "best" else ()),
            )
        last = everywhere and server_round == config.num_rounds
        return (
            *aggregate,
            *cls.training_metrics(config),
            *score_names("personalized"),
            *((validation_name("personalized"),) if selects else ()),
            *(("personalized-global-accuracy",) if last else ()),
        )

    @classmethod
    def training_metrics(cls, config: RunConfig) -> tuple[str, ...]:
        """Return the names of the metrics that `BaseClient.train` returns in every round; by default `train-loss`."""
        return ("train-loss",)


def score_names(kind: Kind) -> tuple[str, ...]:
    """Return the names of the numbers that every evaluation of a kind of model has."""
    return f"{kind}-accuracy", f"{kind}-loss", f"{kind}-balanced-accuracy", f"{kind}-macro-f1"


def validation_name(kind: Kind) -> str:
    """Return the name of the accuracy of a kind of model on validation data that decide about rounds."""
    return f"{kind}-validation-accuracy"


def score_metrics(kind: Kind, scores: Scores) -> dict[str, Scalar]:
    """Return the numbers of an evaluation that leave the client, none of them about a single class.

    Args:
        kind: Kind of model.
        scores: Its predictions for the client's test data.
    """
    values = (scores.accuracy, scores.mean_loss, scores.balanced_accuracy, scores.macro_f1)
    return {
        **dict(zip(score_names(kind), values, strict=True)),
        f"{kind}-auc": scores.auc,
        "majority-share": scores.majority_share,
        "test-examples": float(scores.total),
    }
