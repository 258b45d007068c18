"""PRIV-HFL's server: sums the clients' changes and updates the dual variables; it holds no client's model.

Najafi, Alavizadeh, Shahraki, Kayes, Rahayu: "PRIV-HFL: Privacy-Preserving and Robust Federated Learning for
Heterogeneous Clients Against Data Reconstruction Attacks", algorithms 1 and 2, corrected.

The algorithm and what the server sees are in docs/methods/priv-hfl.md. The mean form needs only the sum of the clients'
changes; the chain form keeps a multiplier for each pair of neighbours and sends every client a force. With distillation
the server steps the generator along the mean of the clients' gradients (equations 21 and 22). In the paper every client
takes that step, which gives the same generator, except on clients that were absent.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid
from numpy.typing import NDArray
from torch import Tensor

from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.core.files.storage import write_arrays
from hyperfl_flwr.core.rng import torch_generator
from hyperfl_flwr.core.setting_types import Scalar, resolved_number
from hyperfl_flwr.methods.priv_hfl import PrivHFLConfig
from hyperfl_flwr.models.generator import Generator, kept_generator_path
from hyperfl_flwr.models.initialisation import ordinary_parameters
from hyperfl_flwr.protocol.arrays import SharedArrays
from hyperfl_flwr.protocol.messages import group_of
from hyperfl_flwr.protocol.packing import pack_arrays, unpack_arrays
from hyperfl_flwr.training.dual_averaging import ChainServer, MeanServer
from hyperfl_flwr.training.dual_stability import default_dual, dual_rule, effective_rate, stability_warnings
from strategies.engine.base import BaseStrategy
from strategies.engine.context import ServerContext

CHANGES, FORCE, GENERATOR, MEAN = "changes/theta", "force/theta", "generator", "mean/theta"


class PrivHFL(BaseStrategy):
    """Sends S to all clients (mean) or r_i to each client (chain), and receives changes of their models."""

    def __init__(self, context: ServerContext) -> None:
        super().__init__(context)
        self.size = sum(parameter.numel() for parameter in self.new_target().parameters())
        rule = dual_rule(context.config.section(PrivHFLConfig))
        self.server: MeanServer | ChainServer
        if rule.realisation == "mean":
            start = torch.zeros(self.size, dtype=torch.float64)
            self.server = MeanServer(rule=rule, consensus=start, total=start)
        else:
            self.server = ChainServer.start(rule, context.config.num_clients, self.size)
        self._increments: dict[int, Tensor] = {}

    @classmethod
    def automatic(cls, config: RunConfig) -> Mapping[str, Scalar]:
        """Return the dual's step size, and the sigma that reduces a multiplier by a tenth in each round."""
        rate = effective_rate(resolved_number(config.learning_rate), config.momentum)
        step, sigma = default_dual(config.section(PrivHFLConfig), rate, config.fraction_train)
        return {"priv-hfl.dual-step": step, "priv-hfl.sigma": sigma}

    @classmethod
    def steps_setting(cls, num_steps: int) -> Mapping[str, Scalar]:
        """Return the setting of the number K of local steps."""
        return {"priv-hfl.local-steps": num_steps}

    @classmethod
    def check(cls, config: RunConfig, input_shape: Sequence[int]) -> None:
        """Refuse distillation on feature vectors.

        Raises:
            ConfigError: If `priv-hfl.distill` is set and the data are not images.
        """
        if config.section(PrivHFLConfig).distill and len(input_shape) != 3:
            raise ConfigError(
                f"priv-hfl.distill needs images (channels, height, width), but the data are vectors of the "
                f"shape {input_shape}; set it to false"
            )

    @classmethod
    def warnings(cls, config: RunConfig) -> Sequence[str]:
        """Return a warning for each setting with which errors grow from round to round."""
        rate = effective_rate(resolved_number(config.learning_rate), config.momentum)
        return stability_warnings(config.section(PrivHFLConfig), rate, config.fraction_train, config.num_rounds)

    def initial_parameters(self) -> dict[str, Mapping[str, Tensor]]:
        """Return S = 0 and perhaps the mean change 0 (mean), and the generator (distillation).

        Clients derive their first model from the seed.
        """
        config, federation = self.context.config, self.context.federation
        groups: dict[str, Mapping[str, Tensor]] = {}
        if isinstance(self.server, MeanServer):
            groups["changes"] = {"theta": torch.zeros(self.size)}
        if config.section(PrivHFLConfig).send_mean:
            groups["mean"] = {"theta": torch.zeros(self.size)}
        if config.section(PrivHFLConfig).distill:
            generator = Generator(
                federation.input_shape, federation.num_classes, config.section(PrivHFLConfig).generator_width
            )
            groups[GENERATOR] = ordinary_parameters(generator, torch_generator(config.seed, GENERATOR))
        return groups

    def per_client_arrays(self, clients: Sequence[int]) -> Mapping[int, SharedArrays]:
        """Return the force r_i on each client in the chain form, nothing in the mean form."""
        if isinstance(self.server, MeanServer):
            return {}
        return {client: {FORCE: self.server.force(client).numpy()} for client in clients}

    def update(self, per_client: Mapping[int, SharedArrays], num_examples: Mapping[int, int]) -> None:
        """Store the changes of the chain's clients until `advance` ends the round."""
        self._increments = {client: torch.tensor(arrays[FORCE]) for client, arrays in per_client.items()}

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Sequence[Message]:
        """Send the mean change instead of S (mean form), so that the clients can evaluate the mean model."""
        return super().configure_evaluate(server_round, self._with_mean(arrays), config, grid)

    def evaluated(self, arrays: ArrayRecord, client: int) -> SharedArrays:
        """Return the arrays that a client is sent after the last round: the mean change instead of S (mean form)."""
        return super().evaluated(self._with_mean(arrays), client)

    def _with_mean(self, arrays: ArrayRecord) -> ArrayRecord:
        if not isinstance(self.server, MeanServer):
            return arrays
        return pack_arrays({**unpack_arrays(arrays), CHANGES: _mean_change(self.server)})

    def advance(self, means: SharedArrays) -> SharedArrays:
        """Add the round's changes (zero for clients that did not finish); update the dual variables and the generator.

        The dual variables are updated in a round without any reply, too: a client that returns catches up by the number
        of rounds it has missed.
        """
        arrays: SharedArrays = {}
        if isinstance(self.server, ChainServer):
            self.server.advance(self._increments)
            self._increments = {}
        else:
            changes = torch.tensor(means[CHANGES], dtype=torch.float64) if means else 0.0
            self.server.advance(changes, self.context.config.num_clients)
            arrays[CHANGES] = self.server.total.numpy().astype(np.float32)
            if self.context.config.section(PrivHFLConfig).send_mean:
                arrays[MEAN] = _mean_change(self.server)
        generator = self._stepped_generator(means)
        self._keep(generator)
        return arrays | generator

    def _stepped_generator(self, gradients: SharedArrays) -> SharedArrays:
        """Return the generator's parameters after a step along the mean gradient, unchanged if there is none."""
        rate = np.float32(self.context.config.section(PrivHFLConfig).generator_learning_rate)
        return {
            key: value - rate * gradients[key] if key in gradients else value
            for key, value in self._current.items()
            if group_of(key) == GENERATOR
        }

    def _keep(self, generator: SharedArrays) -> None:
        """Write a copy of the generator in the rounds that `priv-hfl.keep-generators` selects."""
        every, current = self.context.config.section(PrivHFLConfig).keep_generators, self.progress.round
        if generator and every and current % every == 0:
            path = kept_generator_path(Path(self.context.run_directory), current)
            path.parent.mkdir(exist_ok=True)
            write_arrays(path, {key.partition("/")[2]: value for key, value in generator.items()}, {})

    def server_state(self) -> SharedArrays:
        """Return the dual variables, in float64; in the mean form also the mean change."""
        if isinstance(self.server, MeanServer):
            return {"consensus": self.server.consensus.numpy(), "total": self.server.total.numpy()}
        return {"residuals": self.server.residuals.numpy(), "multipliers": self.server.multipliers.numpy()}

    def load_server_state(self, arrays: SharedArrays) -> None:
        """Restore a state that `server_state` returned."""
        for name, value in arrays.items():
            setattr(self.server, name, torch.tensor(value))


def _mean_change(server: MeanServer) -> NDArray[np.float32]:
    """Return the mean change [m] of the clients' models."""
    found: NDArray[np.float32] = server.consensus.numpy().astype(np.float32)
    return found
