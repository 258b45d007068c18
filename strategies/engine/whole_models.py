"""Base of strategies that receive each client's whole model, and tune the mean of the models after each round."""

from collections.abc import Mapping

from hyperfl_flwr.protocol.arrays import SharedArrays, not_finite
from hyperfl_flwr.protocol.messages import Reduction, group_of
from hyperfl_flwr.protocol.reproducible_sum import ReproducibleSum
from strategies.engine.base import BaseStrategy
from strategies.engine.context import ServerContext

MODEL = "model"


class WholeModels(BaseStrategy):
    """Averages the group `model` (`EACH`) by numbers of samples, bit by bit as FedAvg does, and then tunes the mean.

    The server holds one model per participant until the end of a round.

    Attributes:
        uploads: What each client sent that finished the round, keyed `group/name`, by ascending client id.
    """

    def __init__(self, context: ServerContext) -> None:
        super().__init__(context)
        self.uploads: Mapping[int, SharedArrays] = {}
        self._num_examples: Mapping[int, int] = {}

    def update(self, per_client: Mapping[int, SharedArrays], num_examples: Mapping[int, int]) -> None:
        """Hold what the clients sent until `advance` ends the round."""
        self.uploads, self._num_examples = per_client, num_examples

    def advance(self, means: SharedArrays) -> SharedArrays:
        """Return the tuned mean of the clients' models; the mean itself if tuning it does not end in finite numbers."""
        if not self.uploads:
            return {}
        mean = self._mean()
        tuned = self.tuned(mean)
        if key := not_finite(tuned):
            self.remarks.append(f"{key} is not finite after the server's steps, so the mean of the models is kept")
            tuned = mean
        self.uploads = {}
        return {**means, **tuned}

    def tuned(self, mean: SharedArrays) -> SharedArrays:
        """Return the model of the next round, keyed `model/name`.

        Args:
            mean: Mean of the clients' models by numbers of samples.
        """
        raise NotImplementedError

    def models_of_clients(self) -> list[SharedArrays]:
        """Return the models that the clients sent, in the order of their ids, by name."""
        return [
            {key.partition("/")[2]: value for key, value in arrays.items() if group_of(key) == MODEL}
            for arrays in self.uploads.values()
        ]

    def _mean(self) -> SharedArrays:
        received = {key: value for key, value in self.sent.items() if group_of(key) == MODEL}
        total = ReproducibleSum(received, {MODEL: Reduction.MEAN_BY_EXAMPLES}, **self.rounding)
        for client, arrays in self.uploads.items():
            total.add({key: arrays[key] for key in received}, self._num_examples[client])
        return total.take_mean(sum(self._num_examples.values()), len(self.uploads))
