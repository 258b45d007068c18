"""Write the report of a property game: property.json, a picture, and a self-contained HTML page."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hyperfl_flwr.audit.membership.shadow_runs import Arrays
from hyperfl_flwr.audit.property.attacks import ATTACKS, CONTROLS
from hyperfl_flwr.audit.property.game import PropertyGame
from hyperfl_flwr.audit.property.results import (
    Outcome,
    attack_all,
    is_revealed,
    measure,
    number_text,
    points_text,
    sentence,
)
from hyperfl_flwr.audit.property.views import VIEWS
from hyperfl_flwr.config.table import default_settings
from hyperfl_flwr.core.files.atomic_files import write_atomically
from hyperfl_flwr.core.plurals import counted
from hyperfl_flwr.methods import METHODS
from hyperfl_flwr.pages.figures import captioned
from hyperfl_flwr.pages.render import Settings, percent, plain, write_page
from hyperfl_flwr.runs.figures.plots import save
from hyperfl_flwr.runs.figures.share_plot import Pairs, share_figure

TITLES = {name: row.title for name, row in {**ATTACKS, **CONTROLS}.items()}
"""Titles of the attacks and controls."""


def write_report(game: PropertyGame, observed: Sequence[Arrays], folder: Path) -> dict[str, Any]:
    """Attack the federations of a game, and write property.json, property.png and property.html to a folder.

    Args:
        game: The game.
        observed: What the attackers hold of each federation.
        folder: The report's folder.

    Returns:
        The content of property.json.
    """
    found = attack_all(game, observed)
    document = measure(game, observed, found)
    points = {VIEWS[view]: _points(attacks) for view, attacks in found.items()}
    write_atomically(folder / "property.json", (json.dumps(document, indent=2) + "\n").encode())
    save(share_figure(points, game.largest_share, titled=True), folder / "property.png")
    _write_page(document, points, folder / "property.html")
    return document


def _points(attacks: Mapping[str, Outcome]) -> dict[str, Pairs]:
    return {
        TITLES[name]: (each.whole.true.ravel(), each.whole.estimated[..., 0].ravel())
        for name, each in attacks.items() if name in ATTACKS
    }  # fmt: skip


def _write_page(document: Mapping[str, Any], points: Mapping[str, Mapping[str, Pairs]], file: Path) -> None:
    views, largest = document["views"], document["largest_share"]
    write_page(
        file,
        "property.html",
        heading=f"{document['method']} on {document['dataset']}: property inference",
        verdicts=[("alarm" if is_revealed(document, view) else "plain", view, sentence(document, view))
                  for view in views],
        names=["attacker", "attack", "R²", "error, points", f"AUC at {100 * document['threshold']:g} %"],
        rows=[
            (VIEWS[view], TITLES[name], number_text(numbers["r2"]), points_text(numbers["error"]),
             number_text(numbers["auc"]))
            for view, attacks in views.items() for name, numbers in attacks.items()
        ],
        facts=_facts(document),
        figures=captioned({title: share_figure({title: each}, largest) for title, each in points.items()}),
        found=Settings.of(document["settings"], default_settings(document["method"]), {}),
        circumstances_rows=[
            (name, plain(value)) for part in ("code", "hardware", "versions") for name, value in document[part].items()
        ],
    )  # fmt: skip


def _facts(document: Mapping[str, Any]) -> str:
    return (
        f"{counted(document['federations'], 'federation')} of {counted(document['clients'], 'client')} with "
        f"{document['samples_per_client']} training samples each, of which 0 to {100 * document['largest_share']:g} % "
        f"are of class {document['class']}. What leaves a client: {METHODS[document['method']].sends}. Mean test "
        f"accuracy of the clients' models: {percent(document['test_accuracy'])}, of those that they receive: "
        f"{percent(document['test_accuracy_aggregate'])}."
    )
