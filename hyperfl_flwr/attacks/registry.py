"""Table of the attacks; a new attack is one file and one row."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from hyperfl_flwr.attacks import (
    channels,
    dlg,
    dual_difference,
    encoder_gradient,
    feature_fishing,
    fishing,
    generator_dlg,
    head_gradient,
    idlg,
    ig,
    ig_prior,
    imprint,
    paper_ig,
    rog,
    tailored,
    trap_weights,
)
from hyperfl_flwr.attacks.base import AttackFunction
from hyperfl_flwr.attacks.forging import Forge, check_first_linear
from hyperfl_flwr.attacks.knowledge import PublicKnowledge
from hyperfl_flwr.attacks.optimisation import Optimisation
from hyperfl_flwr.core.method import Part, Upload


@dataclass(frozen=True, kw_only=True)
class Attack:
    """A row of the table.

    Attributes:
        title: Title in tables and figures.
        source: Publication that describes the attack, or `this project`.
        needs: Parts of an upload of which the attack needs one, see `hyperfl_flwr.core.method.Part`.
        run: Function that runs the attack.
        on_uploads: Whether it applies to the upload of one client.
        on_sums: Whether it applies to the sum of the uploads of clients that start from the same parameters.
        needs_history: Whether it needs the observations of a client in all earlier rounds.
        by_neighbours: Whether a client can run it on its neighbour in a chain.
        needs_prior: Whether it needs a space of images that is learned from public ones.
        gets_hidden: Whether it gets HyperFL's activation z of each client, as single uploads reveal it.
        defaults: Default optimisation; None if the attack does not optimise.
        forge: Makes what the server sends, if it is malicious in this attack; None if it follows the protocol.
        finds_images: Whether its results have images.
        check: Raises a ValueError with the reason if the attack cannot use a target network; None if it can use all.
        check_without: Part that makes `check` unnecessary if it is sent, too; None if there is no such part.
    """

    title: str
    source: str
    needs: tuple[Part, ...]
    run: AttackFunction
    on_uploads: bool = True
    on_sums: bool = False
    needs_history: bool = False
    by_neighbours: bool = False
    needs_prior: bool = False
    gets_hidden: bool = False
    defaults: Optimisation | None = None
    forge: Forge | None = None
    finds_images: bool = True
    check: Callable[[PublicKnowledge], None] | None = None
    check_without: Part | None = None

    def applies_to(self, uploads: Iterable[Upload], *, summed: bool = False) -> bool:
        """Return whether it applies to a client's upload, or, if `summed`, to the sum of all clients' uploads."""
        if not (self.on_sums if summed else self.on_uploads):
            return False
        return any(upload.part in self.needs and not (summed and upload.separate_start) for upload in uploads)


FORGED: tuple[Part, ...] = ("model", "extractor", "hypernetwork")
"""Parts of an upload with the feature extractor, which the server has sent: to all clients, or to each its own."""

ATTACKS: Mapping[str, Attack] = {
    "ig": Attack(
        title="Gradient inversion",
        source="Geiping et al., NeurIPS 2020",
        needs=("model",),
        run=ig.ig,
        defaults=ig.DEFAULTS,
    ),
    "ig-paper": Attack(
        title="Gradient inversion, all private parts searched for",
        source="Guo et al., AAAI 2025",
        needs=("hypernetwork",),
        run=paper_ig.paper_ig,
        defaults=paper_ig.DEFAULTS,
    ),
    "head-gradient": Attack(
        title="Head-gradient attack",
        source="this project",
        needs=("model", "extractor", "hypernetwork"),
        on_sums=True,
        run=head_gradient.head_gradient,
        check=head_gradient.check_extractor,
        defaults=head_gradient.DEFAULTS,
    ),
    "idlg": Attack(
        title="Label recovery",
        source="Zhao et al., 2020",
        needs=("model", "layers", "classifier"),
        run=idlg.idlg,
        finds_images=False,
    ),
    "rog": Attack(
        title="Gradient inversion at a quarter of the resolution",
        source="Yue et al., USENIX Security 2023, without its post-processing",
        needs=("model", "extractor", "hypernetwork"),
        run=rog.rog,
        check=head_gradient.check_extractor,
        check_without="model",
        defaults=rog.DEFAULTS,
    ),
    "rog-paper": Attack(
        title="Gradient inversion at a quarter of the resolution, all private parts searched for",
        source="Guo et al., AAAI 2025, appendix D, without post-processing",
        needs=("hypernetwork",),
        run=rog.rog_paper,
        defaults=rog.DEFAULTS,
    ),
    "tailored": Attack(
        title="Inversion of the features in the upload",
        source="Guo et al., AAAI 2025, appendix D; the readings: this project",
        needs=("hypernetwork",),
        run=tailored.tailored,
        check=head_gradient.check_extractor,
        defaults=tailored.DEFAULTS,
    ),
    "dlg": Attack(
        title="Deep leakage from gradients",
        source="Zhu et al., NeurIPS 2019",
        needs=("model",),
        run=dlg.dlg,
        defaults=dlg.DEFAULTS,
    ),
    "ig-prior": Attack(
        title="Gradient inversion with a learned prior",
        source="Jeon et al., NeurIPS 2021; the prior and the search: this project",
        needs=("model", "extractor", "hypernetwork"),
        needs_prior=True,
        run=ig_prior.ig_prior,
        check=head_gradient.check_extractor,
        check_without="model",
        defaults=ig_prior.DEFAULTS,
    ),
    "encoder-gradient": Attack(
        title="Head-gradient attack on the encoder",
        source="this project",
        needs=("encoder",),
        run=encoder_gradient.encoder_gradient,
        defaults=head_gradient.DEFAULTS,
    ),
    "dual-difference": Attack(
        title="Gradient inversion on followed models",
        source="this project",
        needs=("kept-model",),
        needs_history=True,
        by_neighbours=True,
        run=dual_difference.dual_difference,
        defaults=ig.DEFAULTS,
    ),
    "generator-dlg": Attack(
        title="Pseudo-data and label counts from the generator's gradient",
        source="Zhu et al., NeurIPS 2019; the reading: this project",
        needs=("generator",),
        needs_history=True,
        run=generator_dlg.generator_dlg,
        defaults=generator_dlg.DEFAULTS,
    ),
    "channels-known": Attack(
        title="Channels of a sum, activations known",
        source="this project",
        needs=("hypernetwork",),
        on_uploads=False,
        on_sums=True,
        gets_hidden=True,
        run=channels.channels_known,
        check=head_gradient.check_extractor,
        defaults=head_gradient.DEFAULTS,
    ),
    "channels-ica": Attack(
        title="Channels of a sum, by independent components",
        source="this project",
        needs=("hypernetwork",),
        on_uploads=False,
        on_sums=True,
        run=channels.channels_ica,
        check=head_gradient.check_extractor,
        defaults=head_gradient.DEFAULTS,
    ),
    "imprint": Attack(
        title="Bins of an imprint layer",
        source="Fowl et al., ICLR 2022",
        needs=FORGED,
        on_sums=True,
        run=imprint.imprint,
        forge=imprint.forge_imprint,
        check=imprint.check_imprint,
    ),
    "trap-weights": Attack(
        title="Trap weights",
        source="Boenisch et al., EuroS&P 2023",
        needs=FORGED,
        on_sums=True,
        run=trap_weights.trap_weights,
        forge=trap_weights.forge_trap_weights,
        check=check_first_linear,
    ),
    "fishing": Attack(
        title="Fishing for one class",
        source="Wen et al., ICML 2022",
        needs=("model",),
        run=fishing.fishing,
        forge=fishing.forge_fishing,
        check=head_gradient.check_extractor,
        defaults=head_gradient.DEFAULTS,
    ),
    "feature-fishing": Attack(
        title="Fishing for one image of a class",
        source="Wen et al., ICML 2022",
        needs=("model",),
        on_sums=True,
        run=fishing.fishing,
        forge=feature_fishing.forge_feature_fishing,
        check=feature_fishing.check_feature_fishing,
        defaults=head_gradient.DEFAULTS,
    ),
}
"""Attacks by name."""


def attacks_on(uploads: Iterable[Upload], *, summed: bool = False, malicious_server: bool = False) -> list[str]:
    """Return the names of the attacks on some uploads, in the order of the table.

    Args:
        uploads: Parts of a client's upload.
        summed: Whether the server sees only the sum of all clients' uploads.
        malicious_server: Whether the server forges what it sends; then only attacks for which it does so are returned.
    """
    uploads = list(uploads)
    rows = {name: attack for name, attack in ATTACKS.items() if (attack.forge is not None) == malicious_server}
    return [name for name, attack in rows.items() if attack.applies_to(uploads, summed=summed)]
