"""FedGen's server: averages the models, and trains a generator of features with the clients' classifiers.

Zhu, Hong, Zhou: "Data-Free Knowledge Distillation for Heterogeneous Federated Learning", ICML 2021, algorithm 1 and the
authors' code: Adam, of which rate and moments last over the rounds. The noise is Gaussian, as in the text.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from hyperfl_flwr.core.optimisers import Adam
from hyperfl_flwr.core.rng import torch_generator
from hyperfl_flwr.methods.fedgen import FedGenConfig
from hyperfl_flwr.models.feature_generator import FeatureGenerator
from hyperfl_flwr.models.initialisation import initial_state
from hyperfl_flwr.protocol.arrays import SharedArrays, not_finite
from hyperfl_flwr.protocol.messages import LABEL_COUNTS, group_of
from hyperfl_flwr.training.ensemble import Ensemble
from hyperfl_flwr.training.fedgen import GeneratorSteps, decayed, train_generator
from hyperfl_flwr.training.server_adam import adam_state, load_adam_state
from strategies.engine.context import ServerContext
from strategies.engine.label_counts import LabelCounts, counts_in
from strategies.fedavg import FedAvg

WEIGHT_DECAY = 1e-2
"""L2 coefficient of the generator's Adam, from the authors' code."""


class FedGen(LabelCounts, FedAvg):
    """Averages the group `model`, and sends the trained `generator`; `remembered` holds its optimiser's moments."""

    def __init__(self, context: ServerContext) -> None:
        super().__init__(context)
        self._trained: SharedArrays = {}

    def initial_parameters(self) -> dict[str, Mapping[str, Tensor]]:
        """Return the model and the generator; the classifier is the model's, and no label is counted yet."""
        federation, groups = self.context.federation, super().initial_parameters()
        generator = torch_generator(self.context.config.seed, "generator")
        target = self.new_target()
        target.load_state_dict(groups["model"], assign=True)
        return {
            **groups,
            "generator": initial_state(self._new_generator(), generator),
            "classifier": target.classifier.state_dict(),
            group_of(LABEL_COUNTS): {"counts": torch.zeros(federation.num_classes)},
        }

    def update(self, per_client: Mapping[int, SharedArrays], num_examples: Mapping[int, int]) -> None:
        """Train the generator with the clients' classifiers and label counts."""
        config, method = self.context.config, self.context.config.section(FedGenConfig)
        received, generator = _group(self.sent, "generator"), self._new_generator()
        generator.load_state_dict({name: torch.tensor(value) for name, value in received.items()}, assign=True)
        generator.requires_grad_(True)
        rate = decayed(method.generator_learning_rate, method.decay, self.progress.round)
        optimiser = Adam(generator.parameters(), lr=rate, weight_decay=WEIGHT_DECAY)
        named = dict(generator.named_parameters())
        load_adam_state(optimiser, named, {name: torch.tensor(value) for name, value in self.remembered.items()})
        heads = [_group(arrays, "classifier") for arrays in per_client.values()]
        train_generator(
            generator,
            optimiser,
            Ensemble(network=self.new_target().classifier, models=heads),
            counts_in(list(per_client.values())),
            GeneratorSteps(
                steps=method.generator_steps, batch_size=method.generated_samples, diversity=method.diversity
            ),
            torch_generator(config.seed, "fedgen-server", self.progress.round),
        )
        trained = {f"generator/{name}": value.numpy() for name, value in generator.state_dict().items()}
        if not_finite(trained) is None:
            self._trained = trained
            self.remembered = {name: value.numpy() for name, value in adam_state(optimiser, named).items()}

    def advance(self, means: SharedArrays) -> SharedArrays:
        """Return the mean model, its classifier and the trained generator."""
        if not means:
            return {}
        target = self.new_target()
        target.load_state_dict(
            {name: torch.tensor(value) for name, value in _group(means, "model").items()}, assign=True
        )
        head = {f"classifier/{name}": value.numpy() for name, value in target.classifier.state_dict().items()}
        trained, self._trained = self._trained, {}
        return {**means, **head, **trained}

    def _new_generator(self) -> FeatureGenerator:
        federation, method = self.context.federation, self.context.config.section(FedGenConfig)
        return FeatureGenerator(
            self.new_target().classifier.in_features, federation.num_classes, method.generator_width
        )


def _group(arrays: SharedArrays, group: str) -> SharedArrays:
    """Return one group's arrays by name."""
    return {key.partition("/")[2]: value for key, value in arrays.items() if group_of(key) == group}
