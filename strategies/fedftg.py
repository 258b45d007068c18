"""FedFTG's server: averages the models, and fine-tunes the mean on images of a generator that it keeps.

Zhang, Shen, Ding, Tao, Duan: "Fine-tuning Global Model via Data-Free Knowledge Distillation for Non-IID Federated
Learning", CVPR 2022, algorithm 1. The generator is that of PRIV-HFL, which is the paper's.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.core.optimisers import Adam
from hyperfl_flwr.core.rng import torch_generator
from hyperfl_flwr.methods.fedftg import FedFTGConfig
from hyperfl_flwr.models.generator import Generator
from hyperfl_flwr.models.initialisation import initial_state
from hyperfl_flwr.protocol.arrays import SharedArrays, not_finite
from hyperfl_flwr.protocol.messages import LABEL_COUNTS, group_of
from hyperfl_flwr.training.ensemble import Ensemble
from hyperfl_flwr.training.fedftg import Tuning, fine_tune
from hyperfl_flwr.training.fedgen import decayed
from hyperfl_flwr.training.server_adam import adam_state, load_adam_state
from strategies.engine.label_counts import LabelCounts, counts_in
from strategies.engine.whole_models import MODEL, WholeModels
from strategies.fedavg import FedAvg

GENERATOR = "generator/"
"""Prefix, in the server's state, of the generator; the other arrays are those of its optimiser."""


class FedFTG(LabelCounts, WholeModels, FedAvg):
    """Averages the clients' models, and fine-tunes the mean; `remembered` holds the generator and its moments."""

    @classmethod
    def check(cls, config: RunConfig, input_shape: Sequence[int]) -> None:
        """Refuse data that are not images, and settings that would falsify label counts.

        Raises:
            ConfigError: Naming the problem.
        """
        super().check(config, input_shape)
        if config.section(FedFTGConfig).iterations and len(input_shape) != 3:
            raise ConfigError(
                f"fedftg needs images (channels, height, width), but the data are vectors of the shape {input_shape}; "
                f"take feddf or fedgen"
            )

    def initial_parameters(self) -> dict[str, Mapping[str, Tensor]]:
        """Return the model; no label is counted yet."""
        counts = torch.zeros(self.context.federation.num_classes)
        return {**super().initial_parameters(), group_of(LABEL_COUNTS): {"counts": counts}}

    def tuned(self, mean: SharedArrays) -> SharedArrays:
        """Return the mean after `fedftg.iterations` iterations."""
        config, method = self.context.config, self.context.config.section(FedFTGConfig)
        if not method.iterations:
            return mean
        student, network = self.new_target().eval(), self.new_target().eval()
        student.load_state_dict({_name(key): torch.tensor(value) for key, value in mean.items()}, assign=True)
        generator = self._generator()
        rate = decayed(method.generator_learning_rate, method.decay, self.progress.round)
        optimiser, named = Adam(generator.parameters(), lr=rate), dict(generator.named_parameters())
        load_adam_state(optimiser, named, {name: torch.tensor(value) for name, value in self.remembered.items()})
        fine_tune(
            student,
            Ensemble(network=network, models=self.models_of_clients()),
            counts_in(list(self.uploads.values())),
            generator,
            optimiser,
            Tuning(
                iterations=method.iterations,
                student_steps=method.student_steps,
                batch_size=method.batch_size,
                student_learning_rate=decayed(method.student_learning_rate, method.decay, self.progress.round),
                student_weight_decay=method.student_weight_decay,
                diversity=method.diversity,
            ),
            torch_generator(config.seed, "fedftg", self.progress.round),
        )
        trained = {GENERATOR + name: value.detach() for name, value in named.items()} | adam_state(optimiser, named)
        remembered = {name: value.numpy() for name, value in trained.items()}
        if not_finite(remembered) is None:
            self.remembered = remembered
        return {f"{MODEL}/{name}": value.detach().numpy() for name, value in student.state_dict().items()}

    def _generator(self) -> Generator:
        """Return the generator of the round before; before the first round with initial values."""
        federation, method = self.context.federation, self.context.config.section(FedFTGConfig)
        generator = Generator(tuple(federation.input_shape), federation.num_classes, method.generator_width)
        kept = {name: torch.tensor(value) for name, value in self.remembered.items() if name.startswith(GENERATOR)}
        values = {_name(name): value for name, value in kept.items()} or initial_state(
            generator, torch_generator(self.context.config.seed, "generator")
        )
        generator.load_state_dict(values, assign=True)
        return generator.requires_grad_(True)


def _name(key: str) -> str:
    """Return the name in a key `group/name`."""
    return key.partition("/")[2]
