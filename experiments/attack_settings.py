"""The settings `attack.*` of a study's cell that is an attack, see `experiments.attack_cell`."""

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, NonNegativeFloat, NonNegativeInt, PositiveInt, ValidationError

from hyperfl_flwr.attacks.registry import ATTACKS
from hyperfl_flwr.audit.options import Options
from hyperfl_flwr.config.refusals import explain
from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.core.setting_types import Scalar

PREFIX = "attack."
"""Prefix of the attack's settings; the other settings of a cell are those of the attacked round."""

GAMES = MEMBERSHIP, PROPERTY = "membership", "property"
"""Values of `attack.name` for games, whose other settings are `attack.federations`, and of a property game
`attack.label` and `attack.largest-share`."""


class AttackedCell(BaseModel):
    """The settings `attack.*` of a cell.

    Attributes:
        name: Name of the attack, or of several, separated by commas, of which the strongest counts.
        num_images: Total number of private images.
        samples: Number of private images per client; 0 for the batch size.
        iterations: Number of iterations of the optimisation; 0 for the attack's default.
        total_variation: Weight of the total-variation prior; 0 for the attack's default.
        prior: Data set from whose images `ig-prior` learns; empty for other attacks.
        lpips_weights: File of AlexNet's weights for LPIPS; empty to leave LPIPS out.
        labels_known: Whether the attack receives the labels.
        summed: Whether the server sees only the sum of the clients' uploads.
        rounds_before: Number of rounds of training before the attacked round, with the cell's other settings and the
            data set's usual samples per client.
        epochs: Number of local epochs in the attacked round.
        batch_size: Batch size in the attacked round.
        federations: Number of federations of a game, which are trained with the cell's other settings.
        label: The class whose share is estimated in a property game.
        largest_share: Its largest share.
    """

    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", alias_generator=lambda name: PREFIX + name.replace("_", "-")
    )

    name: str
    num_images: PositiveInt = 20
    samples: NonNegativeInt = 0
    iterations: NonNegativeInt = 0
    total_variation: NonNegativeFloat = 0.0
    prior: str = ""
    lpips_weights: str = ""
    labels_known: bool = False
    summed: bool = False
    rounds_before: NonNegativeInt = 0
    epochs: PositiveInt = 1
    batch_size: PositiveInt = 1
    federations: PositiveInt = 16
    label: NonNegativeInt = 0
    largest_share: NonNegativeFloat = 0.6

    @classmethod
    def of(cls, settings: Mapping[str, Scalar]) -> "AttackedCell":
        """Read and check the settings.

        Raises:
            ConfigError: If one is unknown or wrong.
        """
        try:
            found = cls.model_validate(dict(settings))
        except ValidationError as error:
            known = [str(field.alias) for field in cls.model_fields.values()]
            raise ConfigError(explain(error.errors(), known)) from None
        if found.name not in GAMES and (unknown := [name for name in found.names if name not in ATTACKS]):
            raise ConfigError(
                f"attack.name must be one of {', '.join([*ATTACKS, *GAMES])}, or several attacks with commas between "
                f"them; got {unknown[0]!r}"
            )
        return found

    @property
    def names(self) -> list[str]:
        """Names of the attacks."""
        return self.name.split(",")

    def options(self) -> Options:
        """Return the options of `hyperfl_flwr.audit.audit`."""
        return Options(
            attacks=self.names,
            num_images=self.num_images,
            samples=self.samples or None,
            labels_known=self.labels_known,
            summed=self.summed,
            malicious_server=ATTACKS[self.names[0]].forge is not None,
            iterations=self.iterations or None,
            total_variation=self.total_variation or None,
            prior=self.prior,
        )
