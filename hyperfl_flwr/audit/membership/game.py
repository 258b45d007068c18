"""The game of membership inference: its federations, and the confidences of their models."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from hyperfl_flwr.attacks.shadow_scores import Confidences
from hyperfl_flwr.audit.membership.shadow_data import ShadowData, draws_of, load_shadow_data
from hyperfl_flwr.audit.membership.shadow_runs import Arrays, ShadowGame
from hyperfl_flwr.audit.membership.shadow_views import confidences, views_of
from hyperfl_flwr.config.run_config import RunConfig


@dataclass(frozen=True, kw_only=True)
class MembershipGame(ShadowGame[ShadowData]):
    """A game of membership inference, see `hyperfl_flwr.audit.membership.shadow_data`."""

    kind: ClassVar[str] = "membership"
    has_secure_sums: ClassVar[bool] = True

    @property
    def records_uploads(self) -> bool:
        """Whether the server or another client is among the attackers, and single uploads are seen."""
        return bool({"server", "client"} & set(views_of(self.config))) and not self.config.secagg.enabled

    def load(self) -> ShadowData:
        """Load the samples, see `load_shadow_data`."""
        return load_shadow_data(self.config)

    def write_samples(self, data: ShadowData, number: int, path: Path) -> None:
        """Write the drawn half of each client's pool."""
        drawn, _ = draws_of(data, self.config.seed, self.federations)
        data.write_clients(data.drawn(drawn, number), path)

    def observed(self, run: Path, config: RunConfig, data: ShadowData) -> Arrays:
        """Return the scaled confidences [q, n + c] of each view's models, by `view/client`."""
        return {
            f"{view}/{client}": values
            for client in range(config.num_clients)
            for view, values in confidences(run, config, data, client).items()
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class Played:
    """The confidences of all federations' models.

    Attributes:
        data: The samples of the game.
        confidences: By view, for each client [M, q, n + c], the controls last.
    """

    data: ShadowData
    confidences: Mapping[str, Sequence[Confidences]]

    @classmethod
    def of(cls, game: MembershipGame, found: Sequence[Arrays]) -> "Played":
        """Arrange what the attackers hold of each federation, see `hyperfl_flwr.audit.membership.shadow_runs.play`."""
        data = game.load()
        return cls(
            data=data,
            confidences={
                view: [np.stack([arrays[f"{view}/{client}"] for arrays in found]) for client in range(len(data.pools))]
                for view in views_of(game.config)
            },
        )
