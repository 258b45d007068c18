"""FedGen's client: local training on data and on what the received generator generates.

Zhu, Hong, Zhou: "Data-Free Knowledge Distillation for Heterogeneous Federated Learning", ICML 2021, equation 5 and the
authors' code. From the second round on, a step minimises

    CE(p(x), y) + (B_G / B) A_t CE(h(G(e, y~)), y~) + B_t KL(softmax h(G(e, y)) || p(x)).

The generator does not change at clients, and is in evaluation mode.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
from torch import Tensor, nn
from torch.nn import functional

from clients.engine.label_counts import LABELS, count_labels, label_counts
from clients.fedavg import FedAvgClient
from hyperfl_flwr.core.rng import torch_generator
from hyperfl_flwr.methods.fedgen import FedGenConfig
from hyperfl_flwr.models.feature_generator import FeatureGenerator
from hyperfl_flwr.protocol.messages import Reduction
from hyperfl_flwr.training.fedgen import GeneratedTerms, decayed
from hyperfl_flwr.training.local_sgd import Objective


class FedGenClient(FedAvgClient):
    """Shares the model, and sends its classifier and its label counts alone."""

    shared: ClassVar[Mapping[str, Reduction]] = {
        "model": Reduction.MEAN_BY_EXAMPLES,
        "generator": Reduction.DOWN,
        "classifier": Reduction.EACH,
        LABELS: Reduction.EACH,
    }
    has_noisy_steps: ClassVar[bool] = False

    def build_groups(self) -> dict[str, nn.Module]:
        """Return the model, the generator, a second classifier for the copy to send, and the label counts."""
        method, data = self.context.config.section(FedGenConfig), self.context.data
        model = super().build_groups()["model"]
        size = self.model.classifier.in_features
        self.generator = FeatureGenerator(size, data.num_classes, method.generator_width)
        return {
            "model": model,
            "generator": self.generator,
            "classifier": self.new_target().classifier,
            LABELS: label_counts(self.context),
        }

    def networks(self) -> Sequence[nn.Module]:
        """Return the model alone: the generator stays in evaluation mode."""
        return [self.model]

    def train(self, rng: np.random.Generator) -> dict[str, float]:
        """Train the model, and fill the groups that are sent alone."""
        numbers = super().train(rng)
        self.groups["classifier"].load_state_dict(self.model.classifier.state_dict(), assign=True)
        count_labels(self.groups[LABELS], self.context)
        return numbers

    def objective(self) -> Objective | None:
        """Return the loss with the terms on generated features; None in the first round and without weights."""
        context, method = self.context, self.context.config.section(FedGenConfig)
        if context.round < 2 or not (method.generated_weight or method.latent_weight):
            return None
        share = method.generated_samples / context.config.batch_size
        terms = GeneratedTerms(
            generator=self.generator.eval(),
            classifier=self.model.classifier,
            generated=share * decayed(method.generated_weight, method.decay, context.round),
            latent=decayed(method.latent_weight, method.decay, context.round),
            batch_size=method.generated_samples,
            rng=torch_generator(context.config.seed, "fedgen", context.client, context.round),
        )

        def objective(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
            logits = self.model(images)
            return functional.cross_entropy(logits, labels), terms.of(logits, labels)

        return objective
