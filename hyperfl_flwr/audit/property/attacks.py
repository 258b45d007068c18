"""The attacks of a property game: each federation is attacked with those of the other half of the data as shadows.

What attackers hold is arranged by view. A view shows one row for each client, or one for all clients of a federation.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hyperfl_flwr.attacks import bias_shares, shadow_shares
from hyperfl_flwr.audit.membership.shadow_runs import Arrays
from hyperfl_flwr.audit.property.data import Shares
from hyperfl_flwr.audit.property.views import SHARED, views_of
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.rng import numpy_generator

Numbers = NDArray[np.int64]
"""Numbers of federations."""

PERMUTATIONS = 20
"""Number of random orders of the control."""


@dataclass(frozen=True, kw_only=True, eq=False)
class View:
    """What the attackers of one view hold of M federations, with c rows each.

    Attributes:
        features: Features [M, c, F] of each array.
        shares: The true share of the class [M, c].
        singles: Features [M, N, F] of the single clients of shadow federations, which the attackers train themselves,
            if the view shows sums; else empty.
        single_shares: The true shares [M, N] of these clients, or [M, 0].
        gradients: Gradients [M, c, R, K] of the classifier's bias in R rounds; None if the classifier is not sent.
        class_gradients: Those of the attacker's own samples of each class [M, c, R, K, K].
        label: The class.
        seed: Seed of the control's permutations.
    """

    features: Mapping[str, NDArray[np.float32]]
    shares: Shares
    singles: Mapping[str, NDArray[np.float32]]
    single_shares: Shares
    gradients: Shares | None
    class_gradients: Shares | None
    label: int
    seed: int

    def attacked(self, federations: Numbers) -> dict[str, NDArray[np.float32]]:
        """Return the features of some federations, their rows one after the other."""
        return {name: np.concatenate(values[federations]) for name, values in self.features.items()}

    def shadows(self, federations: Numbers) -> tuple[dict[str, NDArray[np.float32]], Shares, Numbers]:
        """Return features, shares and federation of all rows to learn from, those of single clients among them."""
        features = {
            name: np.concatenate([values, self.singles[name]], axis=1)[federations] if self.singles
            else values[federations]
            for name, values in self.features.items()
        }  # fmt: skip
        shares = np.concatenate([self.shares, self.single_shares], axis=1)[federations]
        numbers = np.repeat(federations, shares.shape[1])
        return {name: np.concatenate(values) for name, values in features.items()}, shares.ravel(), numbers


def views_in(config: RunConfig, observed: Sequence[Arrays], shares: Shares, label: int) -> dict[str, View]:
    """Arrange what attackers hold of the federations of a game by view.

    Args:
        config: Settings of the game.
        observed: What they hold of each federation, see `hyperfl_flwr.audit.property.views.observed`.
        shares: The true shares [M, N].
        label: The class.
    """
    stacked = {name: np.stack([arrays[name] for arrays in observed]) for name in observed[0]}
    return {name: _view(name, stacked, shares, label, config.seed) for name in views_of(config)}


def _view(name: str, stacked: Arrays, shares: Shares, label: int, seed: int) -> View:
    prefix = "model/" if name == "model" else "upload/"
    found = {key.removeprefix(prefix): values for key, values in stacked.items() if key.startswith(prefix)}
    of_sum = "sum_" if name in SHARED else ""
    known = {} if name == "model" else {key: stacked.get(of_sum + key) for key in ("bias", "class_bias")}
    biases = {key: values for key, values in known.items() if values is not None}
    if name == "upload":
        found, biases = ({key: values[:, :, :1] for key, values in each.items()} for each in (found, biases))
    features = {key: values.reshape(*values.shape[:2], -1) for key, values in found.items()}
    singles: dict[str, NDArray[np.float32]] = {}
    single_shares = shares[:, :0]
    if name in SHARED:
        singles, single_shares = features, shares
        features = {key: values.mean(axis=1, keepdims=True) for key, values in features.items()}
        shares = shares.mean(axis=1, keepdims=True)
    return View(
        features=features,
        shares=shares,
        singles=singles,
        single_shares=single_shares,
        gradients=biases.get("bias"),
        class_gradients=biases.get("class_bias"),
        label=label,
        seed=seed,
    )


def by_bias(view: View, shadows: Numbers, attacked: Numbers) -> Shares:
    """Return the estimated shares [m, c, 1] by the closed form, which uses no shadows."""
    if view.gradients is None or view.class_gradients is None:
        raise ValueError("the closed form needs the gradient of a shared classifier, but this view has none")
    pairs = zip(np.concatenate(view.gradients[attacked]), np.concatenate(view.class_gradients[attacked]), strict=True)
    found = np.array([bias_shares.shares_of_bias(gradients, expected)[view.label] for gradients, expected in pairs])
    return found.reshape(len(attacked), -1, 1)


def by_regression(view: View, shadows: Numbers, attacked: Numbers) -> Shares:
    """Return the estimated shares [m, c, 1] by regression on the shadows."""
    features, shares, federations = view.shadows(shadows)
    found = shadow_shares.estimates(features, shares[:, None], federations, view.attacked(attacked))
    return _shares(found, attacked)


def permuted(view: View, shadows: Numbers, attacked: Numbers) -> Shares:
    """Return the same [m, c, t] with the shadows' shares in t random orders, from which nothing can be learned."""
    features, shares, federations = view.shadows(shadows)
    rng = numpy_generator(view.seed, "property", "permuted", int(attacked[0] % 2))
    orders = rng.permuted(np.repeat(shares[:, None], PERMUTATIONS, axis=1), axis=0)
    return _shares(shadow_shares.estimates(features, orders, federations, view.attacked(attacked)), attacked)


def prior(view: View, shadows: Numbers, attacked: Numbers) -> Shares:
    """Return the shadows' mean share for everyone [m, c, 1]."""
    _, shares, _ = view.shadows(shadows)
    return np.full((len(attacked), view.shares.shape[1], 1), shares.mean())


def _shares(found: Shares, attacked: Numbers) -> Shares:
    """Return estimates [m c, t], one attacked federation after the other, as shares [m, c, t] in [0, 1]."""
    return np.clip(found.reshape(len(attacked), -1, found.shape[1]), 0.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class ShareAttack:
    """A row of the table.

    Attributes:
        title: Title in tables and figures.
        source: Publication that describes the attack.
        run: Estimates the shares [m, c, t] of attacked federations with shadow federations.
        applies_to: Returns whether it can be used in a view.
    """

    title: str
    source: str
    run: Callable[[View, Numbers, Numbers], Shares]
    applies_to: Callable[[View], bool] = lambda view: True


ATTACKS: Mapping[str, ShareAttack] = {
    "bias": ShareAttack(
        title="bias gradient",
        source="Wainakh et al., PETS 2022; the measured gradients: this project",
        run=by_bias,
        applies_to=lambda view: view.gradients is not None,
    ),
    "regression": ShareAttack(
        title="regression on shadows",
        source="Ganju et al., CCS 2018; Melis et al., IEEE S&P 2019",
        run=by_regression,
    ),
}
"""Attacks by name."""

CONTROLS: Mapping[str, ShareAttack] = {
    "permuted": ShareAttack(title="control: permuted shares", source="this project", run=permuted),
    "prior": ShareAttack(title="control: the mean share", source="this project", run=prior),
}
"""Controls, which must fail, by name."""


def estimated(view: View, attack: ShareAttack, kept: Numbers) -> Shares:
    """Return the estimated shares of some federations, each attacked with those of the other half among them.

    Args:
        view: The view of all federations.
        attack: The attack.
        kept: The federations, with some of either half.

    Returns:
        [m, c, t] with t = 1, or for `permuted` the number of permutations.
    """
    halves = [kept[kept % 2 == half] for half in (0, 1)]
    found = [attack.run(view, shadows, own) for own, shadows in zip(halves, reversed(halves), strict=True)]
    order = np.argsort(np.concatenate(halves), kind="stable")
    return np.concatenate(found)[order]
