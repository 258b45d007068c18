"""Options of an audit."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hyperfl_flwr.attacks.optimisation import Optimisation
from hyperfl_flwr.attacks.registry import Attack
from hyperfl_flwr.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of an audit.

    Attributes:
        attacks: Names of the attacks; empty means all that apply to the method.
        num_images: Total number of private images.
        samples: Number of images per client; None means the batch size, with which an epoch is one step.
        labels_known: Whether the attacks get the labels.
        summed: Whether the server sees only the sum of the clients' uploads.
        by_neighbours: Whether the end clients of a chain attack their neighbours, instead of the server all clients.
        malicious_server: Whether the server forges what it sends.
        iterations: Iterations of each attack's optimisation; None means the attack's default.
        restarts: Random starts of each attack's optimisation; None means the attack's default.
        total_variation: Weight of the prior of smoothness; None means the attack's default.
        prior: Data set from whose images the attacker learns a prior; empty for none.
    """

    attacks: Sequence[str] = ()
    num_images: int = 20
    samples: int | None = None
    labels_known: bool = False
    summed: bool = False
    by_neighbours: bool = False
    malicious_server: bool = False
    iterations: int | None = None
    restarts: int | None = None
    total_variation: float | None = None
    prior: str = ""

    def __post_init__(self) -> None:
        """Raise a ConfigError if `labels_known` is set for attacks that do not use labels."""
        for kind, chosen in {"on a sum": self.summed, "of a malicious server": self.malicious_server}.items():
            if chosen and self.labels_known:
                raise ConfigError(f"attacks {kind} use no labels, so labels-known has no effect; leave it out")

    def optimisation(self, row: Attack) -> Optimisation | None:
        """Return an attack's default optimisation with these options applied; None if it does not optimise."""
        if row.defaults is None:
            return None
        share = row.defaults.polish / (row.defaults.iterations + row.defaults.polish)
        found = row.defaults if self.restarts is None else replace(row.defaults, restarts=self.restarts)
        if self.total_variation is not None:
            found = replace(found, total_variation=self.total_variation)
        if self.iterations is not None:
            polish = round(share * self.iterations)
            found = replace(found, iterations=max(1, self.iterations - polish), polish=polish)
        return found
