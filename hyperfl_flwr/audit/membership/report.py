"""Write the report of a membership game: membership.json, a picture, and a self-contained HTML page."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hyperfl_flwr.audit.membership.game import MembershipGame, Played
from hyperfl_flwr.audit.membership.results import (
    ATTACKS,
    CONTROLS,
    LEAST_FALSE_POSITIVES,
    RATES,
    area_text,
    attack_all,
    is_recognised,
    measure,
    rate_text,
    sentence,
    sentence_left_out,
)
from hyperfl_flwr.audit.membership.shadow_runs import Arrays
from hyperfl_flwr.audit.membership.shadow_views import view_title
from hyperfl_flwr.config.table import default_settings
from hyperfl_flwr.core.files.atomic_files import write_atomically
from hyperfl_flwr.core.plurals import counted
from hyperfl_flwr.methods import METHODS
from hyperfl_flwr.pages.figures import captioned
from hyperfl_flwr.pages.render import Settings, plain, write_page
from hyperfl_flwr.runs.figures.plots import save
from hyperfl_flwr.runs.figures.roc_plot import RocCurve, roc_figure

TITLES = {
    **{name: title for name, (title, _) in ATTACKS.items()},
    **{control: f"control, {ATTACKS[name][0]}" for name, control in CONTROLS.items()},
}
"""Titles of the attacks and of their controls."""


def write_report(game: MembershipGame, observed: Sequence[Arrays], folder: Path) -> dict[str, Any]:
    """Attack the federations of a game, and write membership.json, membership.png and membership.html to a folder.

    Args:
        game: The game.
        observed: What the attackers hold of each federation.
        folder: The report's folder.

    Returns:
        The content of membership.json.
    """
    played = Played.of(game, observed)
    found = attack_all(game, played)
    document = measure(game, played, found)
    titles = {view: view_title(view, is_secure=game.config.secagg.enabled) for view in found}
    curves = {
        titles[view]: {TITLES[name]: each.curve() for name, each in attacks.items()} for view, attacks in found.items()
    }
    resolution = 1 / document["non_members"]
    write_atomically(folder / "membership.json", (json.dumps(document, indent=2) + "\n").encode())
    save(roc_figure(curves, resolution, titled=True), folder / "membership.png")
    _write_page(document, titles, curves, resolution, folder / "membership.html")
    return document


def _write_page(
    document: Mapping[str, Any],
    titles: Mapping[str, str],
    curves: Mapping[str, Mapping[str, RocCurve]],
    resolution: float,
    file: Path,
) -> None:
    heading = f"{document['method']} on {document['dataset']}: membership inference"
    views = document["views"]
    write_page(
        file,
        "membership.html",
        heading=heading,
        verdicts=[
            ("alarm" if is_recognised(document, view) else "plain", view, sentence(document, view)) for view in views
        ] + [("plain", view, sentence_left_out(document, view)) for view in document["left_out"]],
        names=["attacker", "attack", "AUC", *(f"true positives at {100 * rate:g} %" for rate in RATES)],
        rows=[
            (titles[view], TITLES[name], area_text(numbers["auc"]), *map(rate_text, numbers["true_positives"].values()))
            for view, attacks in views.items() for name, numbers in attacks.items()
        ],
        facts=_facts(document),
        needed=[(f"{100 * rate:g} %", document["non_members_needed"][f"{rate:g}"]) for rate in RATES],
        least=LEAST_FALSE_POSITIVES,
        figures=captioned({title: roc_figure({title: each}, resolution) for title, each in curves.items()}),
        found=Settings.of(document["settings"], default_settings(document["method"]), {}),
        circumstances_rows=[
            (name, plain(value)) for part in ("code", "hardware", "versions") for name, value in document[part].items()
        ],
    )  # fmt: skip


def _facts(document: Mapping[str, Any]) -> str:
    sizes = document["samples_per_client"]
    samples = str(sizes[0]) if len(set(sizes)) == 1 else f"{min(sizes)} to {max(sizes)}"
    return (
        f"{counted(document['federations'], 'federation')} of {counted(document['clients'], 'client')} with {samples} "
        f"training samples each, drawn anew for each; {document['members']:,} members and {document['non_members']:,} "
        f"non-members in all. What leaves a client: {METHODS[document['method']].sends}."
    )
