"""The table of attacks: a new one is one file and one row."""

from collections.abc import Mapping
from dataclasses import dataclass

from hyperfl_flwr.attacks import (
    channels,
    dual_difference,
    encoder_gradient,
    generator_dlg,
    head_gradient,
    idlg,
    ig,
    paper_ig,
)
from hyperfl_flwr.attacks.base import Run
from hyperfl_flwr.attacks.optimiser_loop import Optimisation


@dataclass(frozen=True, kw_only=True)
class Attack:
    """A row of the table.

    Attributes:
        title: For tables and figures.
        source: Where it comes from.
        methods: Names of the methods whose single uploads it applies to.
        sums_of: Names of the methods whose sum of uploads it applies to.
        follows: Whether it needs what was seen of a client in all rounds before.
        told_hidden: Whether it is told HyperFL's activation z of each client, which single uploads give away.
        run: The attack.
        defaults: Its own optimisation; None where it searches for nothing.
        finds_images: Whether its results have images.
        of_generator: Whether it needs the gradient of a generator, which clients that distil send.
        of_encoder: Whether it needs a trained encoder, which IT-PFL-HN's clients send in the first phase.
    """

    title: str
    source: str
    methods: tuple[str, ...]
    run: Run
    sums_of: tuple[str, ...] = ()
    follows: bool = False
    told_hidden: bool = False
    defaults: Optimisation | None = None
    finds_images: bool = True
    of_generator: bool = False
    of_encoder: bool = False


ATTACKS: Mapping[str, Attack] = {
    "ig": Attack(
        title="Gradient inversion",
        source="Geiping et al., NeurIPS 2020",
        methods=("fedavg", "fedprox", "pfedhn", "it-pfl"),
        run=ig.ig,
        defaults=ig.DEFAULTS,
    ),
    "ig-paper": Attack(
        title="Gradient inversion, all private parts searched for",
        source="Guo et al., AAAI 2025",
        methods=("hyperfl",),
        run=paper_ig.paper_ig,
        defaults=paper_ig.DEFAULTS,
    ),
    "head-gradient": Attack(
        title="Head-gradient attack",
        source="this project",
        methods=("hyperfl", "hyperfl-frozen", "fedrep", "pfedhn-pc", "pfedhn", "it-pfl", "fedavg", "fedprox"),
        sums_of=("hyperfl", "hyperfl-frozen", "fedrep", "fedavg", "fedprox"),
        run=head_gradient.head_gradient,
        defaults=head_gradient.DEFAULTS,
    ),
    "idlg": Attack(
        title="Label recovery",
        source="Zhao et al., 2020",
        methods=("fedavg", "fedprox", "pfedhn", "it-pfl"),
        run=idlg.idlg,
        finds_images=False,
    ),
    "encoder-gradient": Attack(
        title="Head-gradient attack on the encoder",
        source="this project",
        methods=("it-pfl",),
        run=encoder_gradient.encoder_gradient,
        defaults=head_gradient.DEFAULTS,
        of_encoder=True,
    ),
    "dual-difference": Attack(
        title="Gradient inversion on followed models",
        source="this project",
        methods=("priv-hfl",),
        follows=True,
        run=dual_difference.dual_difference,
        defaults=ig.DEFAULTS,
    ),
    "generator-dlg": Attack(
        title="Pseudo-data and label counts from the generator's gradient",
        source="Zhu et al., NeurIPS 2019; the reading: this project",
        methods=("priv-hfl",),
        follows=True,
        run=generator_dlg.generator_dlg,
        defaults=generator_dlg.DEFAULTS,
        of_generator=True,
    ),
    "channels-known": Attack(
        title="Channels of a sum, activations known",
        source="this project",
        methods=(),
        sums_of=("hyperfl",),
        told_hidden=True,
        run=channels.channels_known,
        defaults=head_gradient.DEFAULTS,
    ),
    "channels-ica": Attack(
        title="Channels of a sum, by independent components",
        source="this project",
        methods=(),
        sums_of=("hyperfl",),
        run=channels.channels_ica,
        defaults=head_gradient.DEFAULTS,
    ),
}
"""Attacks by name."""


def attacks_on(method: str, *, summed: bool = False) -> list[str]:
    """Return the names of the attacks on a method's single uploads, or on their sum, in the order of the table."""
    return [name for name, attack in ATTACKS.items() if method in (attack.sums_of if summed else attack.methods)]
