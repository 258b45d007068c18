"""The membership game on the uploads of a federation, in which canaries are clients.

It is played on the functions that clip uploads and add noise in a run, for each `privacy.noise`: the clients' clipping
and noise (`protect`), the server's noise on the sum (`noisy_means`), or the encoded sum with the shares of all nodes
(`Encoding`, `add_noise`). It checks these and their accounting: not who takes part, metrics, or the protocol of the
secure sum.

The model has m parameters. Canary i changes parameter i alone, by more than the clipping norm C, so that the clipped
changes of all canaries are orthogonal and as long as allowed. A client that does not take part contributes no change,
so that their number stays the same. What the auditor sees is the mean of each round, or with `local` all uploads; the
score of a canary is the sum of its parameter over the rounds.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from hyperfl_flwr.audit.membership.dp_games import Game
from hyperfl_flwr.config.privacy import PrivacyConfig
from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.privacy.accounting import Noise
from hyperfl_flwr.privacy.clip_and_noise import protect
from hyperfl_flwr.protocol.messages import Reduction
from hyperfl_flwr.protocol.reproducible_sum import ReproducibleSum
from hyperfl_flwr.protocol.secure_sums.encoding import Encoding
from hyperfl_flwr.protocol.secure_sums.noise import SumNoise, add_noise
from hyperfl_flwr.protocol.secure_sums.thresholds import smallest_threshold, unknown_nodes
from strategies.engine.client_privacy import noisy_means

_KEY = "model/weight"

_REDUCTIONS: Mapping[str, Reduction] = {"model": Reduction.MEAN}

_CLIP_NORM = 0.5

_EXCESS = 10.0
"""A canary's change before clipping, in units of the clipping norm."""

NODES = 10
"""Number of nodes that share the noise of a sum."""


@dataclass(frozen=True, kw_only=True)
class ClientGame(Game):
    """A game on the uploads of a federation, whose clients are the canaries.

    Attributes:
        noise_from: Where the noise is added, see `privacy.noise`.
        rounds: Number of rounds; all clients take part in each.
    """

    unit: ClassVar[str] = "client"

    noise_from: Noise
    rounds: int

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            ConfigError: If a number is out of range.
        """
        super().__post_init__()
        if self.rounds < 1:
            raise ConfigError(f"a membership game on clients needs at least 1 round, got {self.rounds}")

    @property
    def length(self) -> dict[str, int]:
        """Number of rounds."""
        return {"rounds": self.rounds}

    def scores(self, takes_part: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Return the sum over the rounds of what the auditor sees of each canary's parameter [m]."""
        play_round = {"local": self._uploads, "server": self._noisy_mean, "sum": self._secure_sum}[self.noise_from]
        scores = np.zeros(self.canaries)
        for _ in range(self.rounds):
            scores += play_round(takes_part)
        return scores

    def _received(self) -> NDArray[np.float32]:
        return np.zeros(self.canaries, np.float32)

    def _upload(self, client: int, *, takes_part: bool, noise: float = 0.0) -> NDArray[np.float32]:
        """Return what a client uploads, as `clients.engine.protected_upload` makes it."""
        received, trained = self._received(), self._received()
        trained[client] = _EXCESS * _CLIP_NORM if takes_part else 0.0
        (upload,) = protect([received], [trained], clip_norm=_CLIP_NORM, noise_multiplier=noise)
        return upload

    def _uploads(self, takes_part: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Return canary i's parameter i of its own upload: the other parameters have noise alone."""
        uploads = (self._upload(i, takes_part=bool(part), noise=self.noise) for i, part in enumerate(takes_part))
        return np.array([upload[i] for i, upload in enumerate(uploads)], np.float64)

    def _noisy_mean(self, takes_part: NDArray[np.bool_]) -> NDArray[np.float64]:
        received = {_KEY: self._received()}
        total = ReproducibleSum(received, _REDUCTIONS, num_clients=self.canaries, max_num_examples=1)
        for client, part in enumerate(takes_part):
            total.add({_KEY: self._upload(client, takes_part=bool(part))}, 1)
        roundings = {_KEY: total.rounding(_KEY, _CLIP_NORM)}
        privacy = PrivacyConfig.model_validate(
            {"unit": "client", "noise": "server", "clip-norm": _CLIP_NORM, "noise-multiplier": self.noise}
        )
        means = noisy_means(privacy, received, total.take_changes(self.canaries), roundings, self.canaries)
        return np.asarray(means[_KEY], np.float64)

    def _secure_sum(self, takes_part: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Return the opened sum, with as few shares of noise as an attacker may have before him."""
        noise = SumNoise(clip_norm=_CLIP_NORM, multiplier=self.noise)
        encoding = Encoding(
            received={_KEY: self._received()},
            reductions=_REDUCTIONS,
            num_clients=self.canaries,
            max_examples=1,
            range=1.0,
            noise=noise,
            num_nodes=NODES,
        )
        unknown = unknown_nodes(NODES, smallest_threshold(NODES, 0), 0)
        share = noise.share(encoding.largest, encoding.size, unknown)
        total = encoding.new_sum()
        for client, part in enumerate(takes_part):
            encoding.add(total, {_KEY: self._upload(client, takes_part=bool(part))}, 1)
        for _ in range(unknown):
            add_noise(total, share)
        return np.asarray(encoding.decode(total, self.canaries, 1)[_KEY], np.float64)
