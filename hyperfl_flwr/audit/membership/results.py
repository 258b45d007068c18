"""Measure how well attackers recognise the members of a game, with a control that nobody can recognise.

In the two federations of a pair each sample is a member once and a non-member once, and the pairs are drawn
independently. Each pair is attacked with all others as shadows, so that the scores of different pairs depend on each
other. The intervals are therefore those of the jackknife over the pairs, which repeats all attacks without one of them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperfl_flwr.attacks.shadow_scores import Confidences, likelihood_ratios, loss_scores
from hyperfl_flwr.audit.membership.game import MembershipGame, Played
from hyperfl_flwr.audit.membership.shadow_data import Draws, draws_of
from hyperfl_flwr.audit.membership.shadow_views import left_out, view_title
from hyperfl_flwr.core.packages.code_version import code_entry
from hyperfl_flwr.core.packages.versions import versions
from hyperfl_flwr.data.sample_format import title_of
from hyperfl_flwr.metrics import intervals, roc
from hyperfl_flwr.runs import manifest

RATES = (0.01, 0.001)
"""Rates of false positives at which true positives are measured."""

LEAST_FALSE_POSITIVES = 5
"""Number of false positives that a rate must allow: with fewer, chance decides where the threshold lies."""

BARELY = 0.55
"""Area below the ROC curve up to which an attacker barely recognises members, however narrow its interval is."""

Scores = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Scored:
    """Scores of one attack.

    Attributes:
        members: Scores of all members.
        others: Scores of all non-members.
    """

    members: Scores
    others: Scores

    def area(self) -> float:
        """Return the area below the ROC curve."""
        return roc.area(self.members, self.others)

    def true_positives(self, rate: float) -> float:
        """Return the share of the members above the threshold of a rate of false positives."""
        return float(np.mean(self.members > roc.threshold_at(self.others, rate)))


@dataclass(frozen=True, kw_only=True, eq=False)
class Outcome:
    """Scores of one attack in a game.

    Attributes:
        whole: The scores in all federations.
        without: By pair of federations, the scores in the game without this pair.
    """

    whole: Scored
    without: Sequence[Scored]

    def curve(self) -> tuple[Scores, Scores]:
        """Return the ROC curve, see `hyperfl_flwr.metrics.roc.curve`."""
        return roc.curve(self.whole.members, self.whole.others)

    def area(self) -> dict[str, Any]:
        """Return the area below the ROC curve with its interval."""
        return self._estimate(Scored.area)

    def true_positives(self, rate: float) -> dict[str, Any] | None:
        """Return the rate of true positives at a rate of false positives, with its interval.

        None if there are fewer than `non_members_needed` non-members.
        """
        if len(self.whole.others) < non_members_needed(rate):
            return None
        return self._estimate(lambda found: found.true_positives(rate))

    def _estimate(self, number: Callable[[Scored], float]) -> dict[str, Any]:
        value = number(self.whole)
        interval = intervals.of_jackknife(value, [number(each) for each in self.without])
        if interval is None:
            raise ValueError(f"an interval needs at least two pairs of federations, got {len(self.without)}")
        return {"value": value, "interval": [max(0.0, interval[0]), min(1.0, interval[1])]}


def non_members_needed(rate: float) -> int:
    """Return how many non-members a rate of false positives needs to mean anything."""
    return round(LEAST_FALSE_POSITIVES / rate)


def _by_loss(values: Confidences, drawn: Draws, attacked: int) -> Scores:
    return loss_scores(values[attacked, -1])


def _by_likelihood(values: Confidences, drawn: Draws, attacked: int) -> Scores:
    shadows = [number for number in range(len(values)) if number // 2 != attacked // 2]
    return likelihood_ratios(values[attacked], values[shadows], drawn[shadows])


ATTACKS: Mapping[str, tuple[str, Callable[[Confidences, Draws, int], Scores]]] = {
    "loss": ("loss threshold", _by_loss),
    "lira": ("likelihood ratio", _by_likelihood),
}
"""Titles and functions of the attacks: from confidences [M, q, n], draws [M, n] and the attacked federation's number
to scores [n]."""

CONTROLS: Mapping[str, str] = {"lira": "control", "loss": "loss-control"}
"""Name of each attack's control: the same attack on samples that nobody trained on."""


def outcome(name: str, values: Sequence[Confidences], drawn: Sequence[Draws]) -> Outcome:
    """Attack every federation with all others but its pair as shadows.

    Args:
        name: Name of the attack.
        values: Scaled confidences of each client [M, q, n].
        drawn: Draws of each client [M, n].
    """
    number = len(drawn[0])
    kept = [np.delete(np.arange(number), [first, first + 1]) for first in range(0, number, 2)]
    return Outcome(
        whole=_scored(name, values, drawn),
        without=[_scored(name, [each[k] for each in values], [each[k] for each in drawn]) for k in kept],
    )


def _scored(name: str, values: Sequence[Confidences], drawn: Sequence[Draws]) -> Scored:
    _, attack = ATTACKS[name]
    found = [
        (attack(value, draws, attacked), draws[attacked])
        for value, draws in zip(values, drawn, strict=True) for attacked in range(len(draws))
    ]  # fmt: skip
    return Scored(
        members=np.concatenate([scores[trained_on] for scores, trained_on in found]),
        others=np.concatenate([scores[~trained_on] for scores, trained_on in found]),
    )


def attack_all(game: MembershipGame, played: Played) -> dict[str, dict[str, Outcome]]:
    """Return the scores of each view by attack, and by the name in `CONTROLS` those of each attack's control."""
    pools, controls = draws_of(played.data, game.config.seed, game.federations)
    found = {}
    for view, values in played.confidences.items():
        own = [each[:, :, : drawn.shape[1]] for each, drawn in zip(values, pools, strict=True)]
        unused = [each[:, :, drawn.shape[1] :] for each, drawn in zip(values, pools, strict=True)]
        found[view] = {
            **{name: outcome(name, own, pools) for name in ATTACKS},
            **{control: outcome(name, unused, controls) for name, control in CONTROLS.items()},
        }
    return found


def measure(game: MembershipGame, played: Played, found: Mapping[str, Mapping[str, Outcome]]) -> dict[str, Any]:
    """Return the content of membership.json; docs/privacy/membership.md defines each number."""
    sizes = [len(pool) for pool in played.data.pools]
    return {
        "method": game.config.method,
        "dataset": title_of(game.config.dataset),
        "federations": game.federations,
        "clients": len(sizes),
        "samples_per_client": [size // 2 for size in sizes],
        "members": sum(sizes) * game.federations // 2,
        "non_members": sum(sizes) * game.federations // 2,
        "non_members_needed": {f"{rate:g}": non_members_needed(rate) for rate in RATES},
        "views": {view: {name: _numbers(each) for name, each in attacks.items()} for view, attacks in found.items()},
        "left_out": left_out(game.config),
        "settings": game.config.flat(),
        "code": code_entry(),
        "hardware": manifest.hardware(),
        "versions": versions(),
    }


def sentence(document: Mapping[str, Any], view: str) -> str:
    """Return the verdict on one view as a sentence."""
    found, recognised = document["views"][view], is_recognised(document, view)
    best = max(found[name]["auc"]["value"] for name in ATTACKS)
    verdict = f"{'barely ' if best < BARELY else ''}recognises members" if recognised else "does not recognise members"
    rates = "".join(
        f", {rate_text(known)} of the members at {100 * float(rate):g} % false positives"
        for rate, known in found["lira"]["true_positives"].items()
        if known
    )
    who = view_title(view, is_secure=document["settings"]["secagg.enabled"])
    silence = "" if recognised else " A failed attack is no proof of safety."
    return (
        f"{who[0].upper()}{who[1:]}, {verdict}. The likelihood ratio has an AUC of "
        f"{area_text(found['lira']['auc'])}{rates}; the loss threshold {area_text(found['loss']['auc'])}; their "
        f"controls, on samples that nobody trained on, {area_text(found[CONTROLS['lira']]['auc'])} and "
        f"{area_text(found[CONTROLS['loss']]['auc'])}.{silence}"
    )


def sentence_left_out(document: Mapping[str, Any], view: str) -> str:
    """Return why a view is not measured as a sentence."""
    who = view_title(view, is_secure=document["settings"]["secagg.enabled"])
    return f"{who[0].upper()}{who[1:]}, is not measured: {document['left_out'][view]}."


def is_recognised(document: Mapping[str, Any], view: str) -> bool:
    """Return whether the interval of one of the attacks' areas lies above 0.5, which is guessing."""
    return any(document["views"][view][name]["auc"]["interval"][0] > 0.5 for name in ATTACKS)


def area_text(found: Mapping[str, Any]) -> str:
    """Return an area below the ROC curve with its interval, such as `0.712 (0.690 to 0.734)`."""
    return f"{found['value']:.3f} ({found['interval'][0]:.3f} to {found['interval'][1]:.3f})"


def rate_text(found: Mapping[str, Any] | None) -> str:
    """Return a rate of true positives with its interval, such as `9.1 % (5.2 to 13.0)`; a reason for None."""
    if found is None:
        return "too few non-members"
    low, high = found["interval"]
    return f"{100 * found['value']:.1f} % ({100 * low:.1f} to {100 * high:.1f})"


def _numbers(found: Outcome) -> dict[str, Any]:
    return {"auc": found.area(), "true_positives": {f"{rate:g}": found.true_positives(rate) for rate in RATES}}
