"""Run an attack as a cell of a study.

It records and attacks a round, optionally after some rounds of training. With `attack.name = "membership"` it trains
the federations of a membership game instead, and attacks their models; with "property" those of a property game. With
`secagg.enabled` the server has what it opens, with the nodes' noise if there is any.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from experiments.attack_settings import MEMBERSHIP, PROPERTY, AttackedCell
from hyperfl_flwr.app.client import app
from hyperfl_flwr.app.resolved import replaced, resolved
from hyperfl_flwr.app.server import run
from hyperfl_flwr.attacks.registry import ATTACKS
from hyperfl_flwr.audit.audit import audit
from hyperfl_flwr.audit.make_round import local_epochs_setting, make_attacked_round
from hyperfl_flwr.audit.membership.game import MembershipGame
from hyperfl_flwr.audit.membership.report import write_report as write_membership_report
from hyperfl_flwr.audit.membership.results import RATES
from hyperfl_flwr.audit.membership.shadow_runs import open_game, play
from hyperfl_flwr.audit.property.game import PropertyGame
from hyperfl_flwr.audit.property.report import write_report as write_property_report
from hyperfl_flwr.audit.property.views import ACCURACIES
from hyperfl_flwr.audit.report import measure, write_audit
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.config.sections import AuditConfig
from hyperfl_flwr.core.device import resolve_device
from hyperfl_flwr.core.files.atomic_files import write_atomically
from hyperfl_flwr.core.packages.code_version import code_entry
from hyperfl_flwr.core.packages.versions import versions
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.launch.node_numbers import suitable_for_reduction
from hyperfl_flwr.metrics.images import Lpips
from hyperfl_flwr.runs import manifest
from hyperfl_flwr.server.in_process_grid import InProcessGrid


def run_attack(config: RunConfig, settings: Mapping[str, Scalar], folder: Path) -> None:
    """Run a cell from its start, and write manifest.json, summary.json and an audit's pages to its folder.

    Args:
        config: Settings of the training before the attacked round, and of that round except its samples and steps.
        settings: The cell's settings `attack.*`.
        folder: The cell's folder; its contents are deleted.

    Raises:
        ConfigError: If an attack setting is unknown or wrong.
    """
    cell = AttackedCell.of(settings)  # raises before anything is deleted
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    start = manifest.now()
    summary = GAMES.get(cell.name, _attacked_round)(config, cell, folder)
    document = {
        "experiment": "", "settings": config.flat() | dict(settings),
        "resolved": replaced(config, resolved(config).flat()), "status": "completed", "problem": "",
        "start": start, "end": manifest.now(), "code": code_entry(), "resumed": [],
        "hardware": manifest.hardware(), "versions": versions(),
    }  # fmt: skip
    for name, content in (("summary.json", summary), ("manifest.json", document)):
        write_atomically(folder / name, (json.dumps(content, indent=2) + "\n").encode())


def _attacked_round(config: RunConfig, cell: AttackedCell, folder: Path) -> dict[str, Any]:
    """Attack a round, write the audit's pages, and return the numbers for summary.json."""
    trained = _train(config, cell, folder / "trained") if cell.rounds_before else None
    base = config.flat() | {"batch-size": cell.batch_size, "local-epochs": cell.epochs}
    target = make_attacked_round(base | local_epochs_setting(base, cell.options()), cell.options(), trained)
    lpips = Lpips(Path(cell.lpips_weights), resolve_device(config.device)) if cell.lpips_weights else None
    findings = audit(target, cell.options())
    write_audit(target, findings, folder, lpips)
    document = measure(target, findings, lpips)
    numbers = {name: _numbers(document, name) for name in cell.names}
    strongest = max(cell.names, key=lambda name: _strength(numbers[name]))
    seconds = sum(found["attack_seconds"] for found in numbers.values())
    others = {"attacks": numbers} if len(numbers) > 1 else {}
    return numbers[strongest] | {"attack_seconds": seconds, "strongest": strongest} | others


def _membership(config: RunConfig, cell: AttackedCell, folder: Path) -> dict[str, Any]:
    """Play a membership game, write its pages, and return the numbers for summary.json: `VIEW_ATTACK_NUMBER`."""
    game = MembershipGame(settings=config.flat(), federations=cell.federations)
    open_game(game, folder / "game")
    document = write_membership_report(game, play(game, folder / "game"), folder)
    numbers: dict[str, Any] = {}
    for view, attacks in document["views"].items():
        for attack, found in attacks.items():
            name = f"{view}_{attack}"
            numbers[f"{name}_auc"] = found["auc"]["value"]
            numbers[f"{name}_auc_low"], numbers[f"{name}_auc_high"] = found["auc"]["interval"]
            for rate in RATES:
                known = found["true_positives"][f"{rate:g}"]
                numbers[f"{name}_tpr_{rate:g}"] = known and known["value"]
    return numbers


def _property(config: RunConfig, cell: AttackedCell, folder: Path) -> dict[str, Any]:
    """Play a property game, write its pages, and return the numbers for summary.json: `VIEW_ATTACK_NUMBER`."""
    game = PropertyGame(
        settings=config.flat(), federations=cell.federations, label=cell.label, largest_share=cell.largest_share
    )
    open_game(game, folder / "game")
    document = write_property_report(game, play(game, folder / "game"), folder)
    numbers: dict[str, Any] = {name: document[name] for name in ACCURACIES}
    for view, attacks in document["views"].items():
        for attack, found in attacks.items():
            for number, estimate in found.items():
                name = f"{view}_{attack}_{number}"
                numbers[name] = estimate and estimate["value"]
                numbers[f"{name}_low"], numbers[f"{name}_high"] = estimate["interval"] if estimate else (None, None)
    return numbers


GAMES: Mapping[str, Callable[[RunConfig, AttackedCell, Path], dict[str, Any]]] = {
    MEMBERSHIP: _membership, PROPERTY: _property,
}  # fmt: skip
"""Functions that play games, by `attack.name`."""


def _train(config: RunConfig, cell: AttackedCell, folder: Path) -> Path:
    """Train before the attack, and return the run's folder with the checkpoint and the clients' private state.

    If the attack follows clients over the rounds, the server's observations of them are recorded.
    """
    rounds: dict[str, Any] = {"num_rounds": cell.rounds_before, "checkpoint_every": cell.rounds_before}
    if any(ATTACKS[name].needs_history for name in cell.names):
        rounds["audit"] = AuditConfig(clients="all", rounds="all")
    changed = config.model_copy(update={"output": str(folder), **rounds})
    num_nodes = suitable_for_reduction(config, 1) if config.num_nodes == "auto" else config.num_nodes
    return run(InProcessGrid(app, num_nodes, changed.flat(), {"simulated": True}), changed)


def _strength(numbers: Mapping[str, Any]) -> tuple[float, float]:
    """Return what attacks on the same images are compared by: the number of images recovered, then their PSNR."""
    return numbers.get("images_recovered", 0), numbers.get("psnr", 0.0)


def _numbers(document: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return an attack's numbers for a study's tables, by the names of docs/privacy/audit.md."""
    found = document["attacks"][name]
    numbers: dict[str, Any] = {"labels_found": found["labels_found"], "attack_seconds": found["seconds"]}
    if "psnr" not in found:
        return numbers
    others, mean_image = found["control"]["unrelated"], found["control"]["mean_image"]
    crossed = found["control"]["next_client"]
    return numbers | {
        "psnr": found["psnr"]["mean"],
        "psnr_median": found["psnr"]["median"],
        "ssim": found["ssim"]["mean"],
        "lpips": found["lpips"] and found["lpips"]["mean"],
        "control_psnr": max(others["psnr"]["mean"], mean_image["psnr"]["mean"]),
        "control_ssim": others["ssim"]["mean"],
        "images_recovered": found["images_recovered"],
        "images": len(found["psnr"]["per_image"]),
        **({"next_client_images_recovered": crossed["images_recovered"]} if crossed else {}),
        "recovered": {"recovered": 1.0, "recovered some": 0.5, "recovered nothing": 0.0}[found["verdict"]],
    }
