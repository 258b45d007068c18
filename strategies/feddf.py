"""FedDF's server: distils the ensemble of the clients' models into their mean.

Lin, Kong, Stich, Jaggi: "Ensemble Distillation for Robust Model Fusion in Federated Learning", NeurIPS 2020, algorithm
1: the student starts from the weighted mean, and its softmax is trained towards that of the mean of the clients' logits
on unlabelled samples of the server. The number of steps is fixed: the authors stop early on labelled validation data,
which a server does not have.
"""

from collections.abc import Sequence
from functools import cached_property

import torch

from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.config.unlabelled import Batches, unlabelled_batches
from hyperfl_flwr.core.rng import numpy_generator
from hyperfl_flwr.methods.feddf import FedDFConfig
from hyperfl_flwr.protocol.arrays import SharedArrays
from hyperfl_flwr.training.ensemble import Distillation, Ensemble, distil
from strategies.engine.whole_models import MODEL, WholeModels
from strategies.fedavg import FedAvg


class FedDF(WholeModels, FedAvg):
    """Averages the clients' models, and distils their ensemble into the mean."""

    @classmethod
    def check(cls, config: RunConfig, input_shape: Sequence[int]) -> None:
        """Refuse unlabelled samples that are missing or have another shape than the clients'.

        Raises:
            ConfigError: Naming what is wrong with `feddf.unlabelled`.
        """
        if config.section(FedDFConfig).steps:
            _batches(config, input_shape)

    @cached_property
    def batches(self) -> Batches:
        """Batches of the server's unlabelled samples."""
        return _batches(self.context.config, self.context.federation.input_shape)

    def tuned(self, mean: SharedArrays) -> SharedArrays:
        """Return the mean after `feddf.steps` distillation steps.

        The mean of a single model is that model, from which there is nothing to learn: Adam would turn the rounding of
        its logits into whole steps.
        """
        config, method = self.context.config, self.context.config.section(FedDFConfig)
        models = self.models_of_clients()
        if not method.steps or len(models) < 2:
            return mean
        student, network = self.new_target().eval(), self.new_target().eval()
        values = {key.partition("/")[2]: torch.tensor(value) for key, value in mean.items()}
        student.load_state_dict(values, assign=True)
        draws = numpy_generator(config.seed, "feddf", self.progress.round)
        distil(
            student,
            Ensemble(network=network, models=models),
            lambda: self.batches(method.batch_size, draws),
            Distillation(steps=method.steps, learning_rate=method.learning_rate, clip_norm=method.clip_norm),
        )
        return {f"{MODEL}/{name}": value.detach().numpy() for name, value in student.state_dict().items()}


def _batches(config: RunConfig, input_shape: Sequence[int]) -> Batches:
    return unlabelled_batches(config, "feddf.unlabelled", config.section(FedDFConfig).unlabelled, input_shape)
