"""The game of property inference: which share of a client's training samples is of one class."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from hyperfl_flwr.audit.membership.shadow_runs import Arrays, ShadowGame
from hyperfl_flwr.audit.property.data import PropertyData, load_property_data
from hyperfl_flwr.audit.property.views import observed
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.methods import METHODS


@dataclass(frozen=True, kw_only=True)
class PropertyGame(ShadowGame[PropertyData]):
    """A game of property inference, see `hyperfl_flwr.audit.property.data`.

    Attributes:
        label: The class whose share is estimated, in 0..K-1.
        largest_share: Its largest share, in (0, 1].
    """

    label: int = 0
    largest_share: float = 0.6
    kind: ClassVar[str] = "property"
    has_secure_sums: ClassVar[bool] = False  # what they open is computed from single uploads, which are recorded

    def __post_init__(self) -> None:
        """Check the settings of all games, and that the clients have one network.

        Raises:
            ConfigError: If they are wrong.
        """
        super().__post_init__()
        config = self.config
        if len(names := set(METHODS[config.method].targets(config))) > 1:
            raise ConfigError(
                f"all clients must train the same network, so that their uploads can be compared; got "
                f"{', '.join(sorted(names))}"
            )

    @property
    def description(self) -> dict[str, Any]:
        """All that determines the game, for its folder."""
        return {**super().description, "label": self.label, "largest_share": self.largest_share}

    @property
    def records_uploads(self) -> bool:
        """Whether the method sends anything."""
        return bool(METHODS[self.config.method].active_uploads(self.config, 1))

    def load(self) -> PropertyData:
        """Load the samples and draw the shares, see `load_property_data`."""
        return load_property_data(self.config, self.federations, self.label, self.largest_share)

    def write_samples(self, data: PropertyData, number: int, path: Path) -> None:
        """Write the drawn samples of each client."""
        data.write_clients(data.drawn(number), path)

    def observed(self, run: Path, config: RunConfig, data: PropertyData) -> Arrays:
        """Return features of uploads and models, see `hyperfl_flwr.audit.property.views.observed`."""
        return observed(run, config, data)
