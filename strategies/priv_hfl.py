"""PRIV-HFL's server: adds up the clients' changes and advances the dual variables; it holds no client's model.

Najafi, Alavizadeh, Shahraki, Kayes, Rahayu: "PRIV-HFL: Privacy-Preserving and Robust Federated Learning for
Heterogeneous Clients Against Data Reconstruction Attacks", algorithms 1 and 2 without the generator, corrected.

docs/priv_hfl.md has the algorithm and what the server sees. In the mean form it needs nothing but the sum of the
clients' changes; in the chain it keeps a multiplier for each pair of neighbours and sends every client a force.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from flwr.app import ArrayRecord, MetricRecord
from torch import Tensor

from hyperfl_flwr.arrays import SharedArrays, pack_arrays, unpack_arrays
from hyperfl_flwr.grid import Exchange
from hyperfl_flwr.models.targets import build_target
from hyperfl_flwr.training.dual import ChainServer, MeanServer
from hyperfl_flwr.training.dual_stability import dual_rule, stability_warnings
from strategies.base import BaseStrategy, Setting

CHANGES, FORCE = "changes/theta", "force/theta"


class PrivHFL(BaseStrategy):
    """Sends S to all (mean) or r_i to each client (chain); gets changes of models back."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        config, federation = setting.config, setting.federation
        target = build_target(config.target, federation.input_shape, federation.num_classes)
        self.size = sum(parameter.numel() for parameter in target.parameters())
        rule = dual_rule(config)
        self.server: MeanServer | ChainServer
        if rule.realisation == "mean":
            start = torch.zeros(self.size, dtype=torch.float64)
            self.server = MeanServer(rule=rule, consensus=start, total=start)
        else:
            self.server = ChainServer.start(rule, config.num_clients, self.size)
        self._increments: dict[int, Tensor] = {}

    def warnings(self) -> Sequence[str]:
        """Return under which settings errors grow."""
        return stability_warnings(self.setting.config)

    def initial_parameters(self) -> dict[str, Mapping[str, Tensor]]:
        """Return S = 0, in the chain nothing; the clients make their first model from the seed."""
        return {"changes": {"theta": torch.zeros(self.size)}} if isinstance(self.server, MeanServer) else {}

    def own_arrays(self, clients: Sequence[int]) -> Mapping[int, SharedArrays]:
        """Return in the chain the force on each client."""
        if isinstance(self.server, MeanServer):
            return {}
        return {client: {FORCE: self.server.force(client).numpy()} for client in clients}

    def update(self, own: Mapping[int, SharedArrays], num_examples: Mapping[int, int]) -> None:
        """Keep the changes of a chain's clients until the round ends."""
        self._increments = {client: torch.tensor(arrays[FORCE]) for client, arrays in own.items()}

    def reduce(self, exchanges: Iterable[Exchange]) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Add the changes of those who finished, absent clients counting as zero, and advance the dual variables.

        They advance in a round without any reply as well: a client counts rounds to catch up.
        """
        self._increments = {}
        summed, weights = super().reduce(exchanges)
        if isinstance(self.server, ChainServer):
            self.server.advance(self._increments)
            return summed, weights
        changes = 0.0 if summed is None else torch.tensor(unpack_arrays(summed)[CHANGES], dtype=torch.float64)
        self.server.advance(changes, self.setting.config.num_clients)
        return pack_arrays({CHANGES: self.server.total.numpy().astype(np.float32)}), weights

    def server_state(self) -> SharedArrays:
        """Return the dual variables; in the mean form also the mean change, in float64."""
        if isinstance(self.server, MeanServer):
            return {"consensus": self.server.consensus.numpy(), "total": self.server.total.numpy()}
        return {"residuals": self.server.residuals.numpy(), "multipliers": self.server.multipliers.numpy()}

    def load_server_state(self, arrays: SharedArrays) -> None:
        """Go back to a state that `server_state` returned."""
        for name, value in arrays.items():
            setattr(self.server, name, torch.tensor(value))
