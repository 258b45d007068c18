"""The metrics that clients report after training and evaluation."""

from flwr.app import ConfigScalar as Scalar

from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.metrics.classification import ClassificationSums
from hyperfl_flwr.protocol.secure_sums.header import Phase


class ReportedMetrics:
    """Names of a method's metrics, which a secure step states before its clients report them."""

    @classmethod
    def metric_names(cls, config: RunConfig, phase: Phase, server_round: int) -> tuple[str, ...]:
        """Return the names of the metrics that every client reports, in the order of the sums of a secure step.

        Times and counts are left out: with secure sums, no node sends those of its clients.

        Args:
            config: The run's settings.
            phase: `train` for the metrics of `BaseClient.fit`, `evaluate` for those of `BaseClient.evaluate`.
            server_round: The federated round, from 1.
        """
        everywhere = config.data.global_test
        if phase == "evaluate":
            return (*accuracy_names("aggregate"), *(("aggregate-global-accuracy",) if everywhere else ()))
        last = everywhere and server_round == config.num_rounds
        return (
            *accuracy_names("aggregate"),
            *cls.training_metrics(config),
            *accuracy_names("personalized"),
            *(("personalized-global-accuracy",) if last else ()),
        )

    @classmethod
    def training_metrics(cls, config: RunConfig) -> tuple[str, ...]:
        """Return the names of the metrics that `BaseClient.train` returns in every round; by default `train-loss`."""
        return ("train-loss",)


def accuracy_names(kind: str) -> tuple[str, str]:
    """Return the names of accuracy and loss of a kind of model, `aggregate` or `personalized`."""
    return f"{kind}-accuracy", f"{kind}-loss"


def accuracy_metrics(kind: str, sums: ClassificationSums) -> dict[str, Scalar]:
    """Return accuracy, loss and number of test samples of a kind of model, `aggregate` or `personalized`."""
    accuracy, loss = accuracy_names(kind)
    return {accuracy: sums.accuracy, loss: sums.mean_loss, "test-examples": float(sums.total)}
