"""Measure how well attackers estimate the share of a class, with controls that know nothing.

A federation of either half of the data is a pair with one of the other half. All estimates of a half have the same
shadow federations, so that they depend on each other. The intervals are therefore those of the jackknife over the
pairs, which repeats all attacks without one of them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hyperfl_flwr.audit.membership.shadow_runs import Arrays
from hyperfl_flwr.audit.property.attacks import ATTACKS, CONTROLS, ShareAttack, View, estimated, views_in
from hyperfl_flwr.audit.property.data import Shares
from hyperfl_flwr.audit.property.game import PropertyGame
from hyperfl_flwr.audit.property.views import ACCURACIES, SHARED, VIEWS
from hyperfl_flwr.core.packages.code_version import code_entry
from hyperfl_flwr.core.packages.versions import versions
from hyperfl_flwr.data.sample_format import title_of
from hyperfl_flwr.metrics import intervals, roc
from hyperfl_flwr.runs import manifest

BARELY = 0.1
"""R² up to which an attacker barely estimates a share, however narrow its interval is."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Guesses:
    """Estimated and true shares of one attack in some federations.

    Attributes:
        estimated: Estimates [m, c, t].
        true: True shares [m, c].
    """

    estimated: Shares
    true: Shares

    def r2(self) -> float:
        """Return the share of the true shares' variance that the estimates explain: 1 if exact, 0 for their mean."""
        errors = np.mean((self.estimated - self.true[..., None]) ** 2)
        return float(1 - errors / np.var(self.true))

    def error(self) -> float:
        """Return the mean absolute error."""
        return float(np.mean(np.abs(self.estimated - self.true[..., None])))

    def area(self, threshold: float) -> float | None:
        """Return the area below the ROC curve of telling shares above a threshold; None if all are on one side."""
        above = self.true > threshold + 1e-9
        if above.all() or not above.any():
            return None
        columns = range(self.estimated.shape[2])
        return float(np.mean([roc.area(self.estimated[above, k], self.estimated[~above, k]) for k in columns]))


@dataclass(frozen=True, kw_only=True, eq=False)
class Outcome:
    """Estimates of one attack in a game.

    Attributes:
        whole: Those in all federations.
        without: By pair of federations, those in the game without this pair.
    """

    whole: Guesses
    without: Sequence[Guesses]

    def numbers(self, threshold: float) -> dict[str, Any]:
        """Return R², mean absolute error and area below the ROC curve, each with its interval, or None."""
        return {
            "r2": self._estimate(Guesses.r2, -np.inf, 1.0),
            "error": self._estimate(Guesses.error, 0.0, 1.0),
            "auc": self._estimate(lambda found: found.area(threshold), 0.0, 1.0),
        }

    def _estimate(
        self, number: Callable[[Guesses], float | None], lowest: float, highest: float
    ) -> dict[str, Any] | None:
        value, others = number(self.whole), [number(each) for each in self.without]
        known = [each for each in others if each is not None]
        if value is None or len(known) < len(others):
            return None
        interval = intervals.of_jackknife(value, known)
        if interval is None:
            raise ValueError(f"an interval needs at least two pairs of federations, got {len(others)}")
        return {"value": value, "interval": [max(lowest, interval[0]), min(highest, interval[1])]}


def outcome(view: View, attack: ShareAttack) -> Outcome:
    """Attack every federation of a view with those of the other half as shadows."""
    everyone = np.arange(len(view.shares))
    kept = [np.delete(everyone, [first, first + 1]) for first in range(0, len(everyone), 2)]
    whole, *without = [
        Guesses(estimated=estimated(view, attack, federations), true=view.shares[federations])
        for federations in (everyone, *kept)
    ]
    return Outcome(whole=whole, without=without)


def attack_all(game: PropertyGame, observed: Sequence[Arrays]) -> dict[str, dict[str, Outcome]]:
    """Return the estimates of each view, by attack and control."""
    views = views_in(game.config, observed, game.load().shares, game.label)
    return {
        name: {
            attack: outcome(view, row) for attack, row in {**ATTACKS, **CONTROLS}.items() if row.applies_to(view)
        }
        for name, view in views.items()
    }  # fmt: skip


def measure(
    game: PropertyGame, observed: Sequence[Arrays], found: Mapping[str, Mapping[str, Outcome]]
) -> dict[str, Any]:
    """Return the content of property.json; docs/privacy/property.md defines each number."""
    data = game.load()
    threshold = game.largest_share / 2
    names = data.dataset.classes
    return {
        "method": game.config.method,
        "dataset": title_of(game.config.dataset),
        "label": game.label,
        "class": names[game.label] if names else str(game.label),
        "largest_share": game.largest_share,
        "threshold": threshold,
        "federations": game.federations,
        "clients": game.config.num_clients,
        "samples_per_client": data.samples,
        **{name: float(np.mean([arrays[name] for arrays in observed])) for name in ACCURACIES},
        "views": {
            view: {name: each.numbers(threshold) for name, each in attacks.items()} for view, attacks in found.items()
        },
        "settings": game.config.flat(),
        "code": code_entry(),
        "hardware": manifest.hardware(),
        "versions": versions(),
    }


def best_attack(document: Mapping[str, Any], view: str) -> str:
    """Return the attack with the largest R² in a view, among those with the strongest verdict."""
    found = document["views"][view]
    return max(
        (name for name in ATTACKS if name in found),
        key=lambda name: (_estimates(found[name]), _tells(found[name]), float(found[name]["r2"]["value"])),
    )


def verdict(document: Mapping[str, Any], view: str) -> str:
    """Return what the best attack of a view does: `estimates`, `barely estimates`, `does not estimate`.

    One whose estimates are no better than the mean may still put clients into the right order: `does not estimate, but
    ranks,`.
    """
    best = document["views"][view][best_attack(document, view)]
    if _estimates(best):
        return "barely estimates" if best["r2"]["value"] < BARELY else "estimates"
    return "does not estimate, but ranks," if _tells(best) else "does not estimate"


def is_revealed(document: Mapping[str, Any], view: str) -> bool:
    """Return whether one of the attacks finds out anything about the shares."""
    return verdict(document, view) != "does not estimate"


def _estimates(numbers: Mapping[str, Any]) -> bool:
    """Return whether the interval of R² lies above 0, which is guessing the mean."""
    return bool(numbers["r2"]["interval"][0] > 0)


def _tells(numbers: Mapping[str, Any]) -> bool:
    """Return whether the interval of the area below the ROC curve lies above one half, which is guessing."""
    return numbers["auc"] is not None and bool(numbers["auc"]["interval"][0] > 0.5)


def sentence(document: Mapping[str, Any], view: str) -> str:
    """Return the verdict on one view as a sentence."""
    found, name = document["views"][view], best_attack(document, view)
    data = "the data of all clients" if view in SHARED else "the client's data"
    errors = [f"{100 * found[each]['error']['value']:.1f}" for each in (name, "prior")]
    distinguished = ""
    if (area := found[name]["auc"]) is not None:
        threshold = f"{100 * document['threshold']:g} %"
        auc = number_text(area)
        distinguished = f" Shares above {threshold} are distinguished from smaller ones with an AUC of {auc}."
    silence = "" if is_revealed(document, view) else " A failed attack is no proof of safety."
    return (
        f"{VIEWS[view][0].upper()}{VIEWS[view][1:]} {verdict(document, view)} the share of class {document['class']} "
        f"in {data}. {ATTACKS[name].title.capitalize()} has R² {number_text(found[name]['r2'])} and is {errors[0]} "
        f"percentage points off on average, guessing the mean {errors[1]}; R² of the control with permuted shares is "
        f"{number_text(found['permuted']['r2'])}.{distinguished}{silence}"
    )


def number_text(found: Mapping[str, Any] | None) -> str:
    """Return a number with its interval, such as `0.712 (0.690 to 0.734)`; a reason for None."""
    if found is None:
        return "too few federations"
    return f"{found['value']:.3f} ({found['interval'][0]:.3f} to {found['interval'][1]:.3f})"


def points_text(found: Mapping[str, Any]) -> str:
    """Return an error of shares in percentage points with its interval, such as `3.1 (2.2 to 4.0)`."""
    low, high = found["interval"]
    return f"{100 * found['value']:.1f} ({100 * low:.1f} to {100 * high:.1f})"
