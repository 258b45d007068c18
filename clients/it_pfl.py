"""IT-PFL-HN's clients: train a generated model, and an encoder that predicts the client's embedding from its data.

"Inference-Time Personalized Federated Learning", under review at ICLR 2022, section 4 and appendix B. The algorithm
is in docs/methods/it-pfl.md.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from clients.novel.answers import is_novel, unlabelled
from clients.pfedhn import PFedHNClient
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.rng import numpy_generator
from hyperfl_flwr.data.sample_format import refuse_own_statistics
from hyperfl_flwr.methods.it_pfl import ITPFLConfig
from hyperfl_flwr.methods.pfedhn import PFedHNConfig
from hyperfl_flwr.models.encoder import build_encoder
from hyperfl_flwr.privacy.private_mean import descriptor_release, private_descriptor
from hyperfl_flwr.protocol.arrays import SharedArrays
from hyperfl_flwr.protocol.messages import Reduction, group_of
from hyperfl_flwr.protocol.queries import DESCRIPTOR, QuerySpec
from hyperfl_flwr.training.encoder import train_encoder
from hyperfl_flwr.training.public_training import EncoderForm, LocalSteps, PublicTraining


def encoder_steps(config: RunConfig) -> LocalSteps:
    """Return the local steps that train the encoder."""
    method, of_model = config.section(ITPFLConfig), PFedHNClient.local_steps(config)
    return replace(
        of_model,
        steps=method.encoder_steps or of_model.steps,
        batch_size=method.encoder_batch_size,
        learning_rate=method.encoder_learning_rate,
    )


class ITPFLClient(PFedHNClient):
    """Trains the model as pFedHN's clients do, and in the first phase the encoder.

    The upload of the group `encoder` is the trained parameters, that of `model` the change (before minus after).
    The received `embedding` is the encoder's training target, or the input that generated the model; its upload is
    zero, or noise with `privacy.*`.
    """

    shared: ClassVar[Mapping[str, Reduction]] = {
        "encoder": Reduction.MEAN,
        "model": Reduction.PER_CLIENT,
        "embedding": Reduction.PER_CLIENT,
    }

    @classmethod
    def public_training(cls, config: RunConfig) -> PublicTraining:
        """Return the local steps that train the model, and the form and the steps of the encoder."""
        form = EncoderForm(pooling=config.section(ITPFLConfig).pooling, steps=encoder_steps(config))
        return replace(super().public_training(config), encoder=form)

    def build_groups(self) -> dict[str, nn.Module]:
        """Return the encoder, the target network, and a table of one embedding [1, d]."""
        config, shape = self.context.config, self.context.data.train_images.shape[1:]
        dimension = config.section(PFedHNConfig).dimension(config.num_clients)
        self.encoder = build_encoder(config.target, shape, dimension, config.section(ITPFLConfig).pooling)
        self.embedding = nn.Embedding.from_pretrained(torch.empty(1, dimension, device="meta"), freeze=False)  # type: ignore[no-untyped-call]
        return {"encoder": self.encoder, **super().build_groups(), "embedding": self.embedding}

    def exchanged_groups(self) -> tuple[str, ...]:
        """Return the shared groups of the round, without the encoder in the second phase, in which it is constant."""
        config = self.context.config
        frozen = config.section(ITPFLConfig).fine_tunes(self.context.round, config.num_rounds)
        return tuple(group for group in self.shared if not (frozen and group == "encoder"))

    def least_steps(self, samples: int) -> int:
        """Return the number of local steps of the model or of the encoder, whichever is smaller."""
        of_model = super().least_steps(samples)
        if "encoder" not in self.exchanged_groups():
            return of_model
        return min(of_model, encoder_steps(self.context.config).num_steps(samples))

    def least_samples(self, samples: int) -> int:
        """Return the number of samples that the model or the encoder is trained on, whichever is smaller."""
        of_model = super().least_samples(samples)
        if "encoder" not in self.exchanged_groups():
            return of_model
        return min(of_model, encoder_steps(self.context.config).num_used(samples))

    def train(self, rng: np.random.Generator) -> dict[str, float]:
        """Train the model, and the encoder unless it is frozen.

        Reports `train-loss`; while the encoder is trained also `encoder-loss`, and `embedding-distance`
        |g(D) - t|^2 / d between the received encoder's descriptor and its target t.
        """
        numbers = super().train(rng)
        if "encoder" not in self.exchanged_groups():
            return numbers
        steps, seed = encoder_steps(self.context.config), self.context.config.seed
        embedding, data = self.embedding.weight[0].detach(), self.context.data
        distance = self.encoder.descriptor(data.train_images) - embedding
        numbers["embedding-distance"] = float(distance.square().mean())
        numbers["encoder-loss"] = train_encoder(
            self.encoder,
            embedding,
            data,
            steps,
            # A separate stream of random numbers: the model's stream, and so its training, is that of pFedHN.
            numpy_generator(seed, "encoder", self.context.client, self.context.round),
            learning_rate=steps.learning_rate,
            clip_norm=steps.clip_norm,
        )
        return numbers

    def reply(self, received: list[NDArray[Any]], trained: list[NDArray[Any]]) -> list[NDArray[Any]]:
        """Return the trained encoder, and for the other groups the change (before minus after)."""
        uploaded = self.protected(received, trained)
        return [
            after if group_of(key) == "encoder" else before - after
            for key, before, after in zip(self.keys(), received, uploaded, strict=True)
        ]

    def describe(self, received: SharedArrays, question: QuerySpec) -> tuple[SharedArrays, int]:
        """Return the descriptor g(D) [1, d] of training samples D without their labels, and the number of samples.

        Args:
            received: The encoder g, keyed `encoder/name`.
            question: The samples to describe, and the noise.

        Raises:
            ValueError: If the arrays do not fit the encoder, noise cannot protect its descriptors, or a query to a
                trained client selects, corrupts or noises samples.
            RefusalError: If the owner's privacy budget does not allow it, noise does not suffice, see
                `refuse_own_statistics`, or there are fewer samples than the owner allows.
        """
        if question != QuerySpec() and not is_novel(self.context):
            raise ValueError("a trained client describes all of its samples, unchanged, or none")
        refuse_own_statistics(own_statistics=self.context.own_statistics and question.epsilon is not None)
        self.load_group("encoder", {key: torch.tensor(value) for key, value in received.items()})
        samples = unlabelled(self.context, question)
        if self.context.checks is not None:
            self.context.checks.require_size(f"client {self.context.client}", samples=len(samples))
        if self.context.budget:
            self.context.budget.spend(self.context.round, descriptor_release(question.epsilon, question.delta))
        if question.epsilon is None:
            descriptor = self.encoder.descriptor(samples)
        else:
            descriptor = private_descriptor(self.encoder, samples, epsilon=question.epsilon, delta=question.delta)
        return {DESCRIPTOR: descriptor.cpu().numpy()[np.newaxis]}, len(samples)
