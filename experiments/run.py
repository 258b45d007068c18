"""Runs the app on a SuperLink of its own and follows it to the end."""

import math
from pathlib import Path

from experiments.bundle import build_app
from experiments.cores import WAITING, CoreSlots
from experiments.flower import federation_config
from experiments.following import Observer, explained, follow
from experiments.plans import SimulationPlan
from experiments.superlink import LocalSuperLink
from hyperfl_flwr.toml_settings import settings_text


def launch(planned: SimulationPlan, observer: Observer) -> Path:
    """Run the app in Flower's simulation engine and wait for its end.

    Args:
        planned: What `experiments.planning.plan` has checked.
        observer: Hears of the run.

    Returns:
        The run's folder.

    Raises:
        RunFailedError: If the run failed, whatever Flower's commands said.
    """
    for warning in planned.warnings:
        observer.on_note(f"warning: {warning}")
    with CoreSlots() as slots:
        wanted = planned.num_nodes * planned.threads
        held = slots.acquire(wanted, lambda: observer.on_note(f"{WAITING} for one"))
        with LocalSuperLink() as superlink:
            app = build_app(superlink.home / "app", planned.source)
            settings = superlink.home / "settings.toml"
            settings.write_text(settings_text(planned.settings))
            actors = max(1, held // planned.threads)
            observer.on_note(_where(planned, actors))
            run_id = superlink.submit(app, settings, _federation(planned, actors))
            with explained(planned, observer):
                return follow(superlink, run_id, planned, observer)


def _where(planned: SimulationPlan, actors: int) -> str:
    """Say where a run trains, and how to have it otherwise."""
    text = (
        f"{planned.settings['num-clients']} clients on {planned.num_nodes} nodes in {actors} processes, "
        f"{planned.threads} thread(s) each, on {planned.device}"
    )
    if planned.chosen_for:
        text += f"; chosen for {planned.chosen_for}, set --num-nodes and --set threads= to change it"
    return text


def _federation(planned: SimulationPlan, actors: int) -> str:
    if planned.device != "cuda":
        return federation_config(planned.num_nodes, actors)
    sharing = math.ceil(actors / planned.num_gpus)  # Ray places each process on one GPU
    return federation_config(planned.num_nodes, actors, planned.num_gpus, 1 / sharing)
