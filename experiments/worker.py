"""Run a study's cells one after the other in this process: `python -m experiments.worker`.

Each line on standard input is a JSON object with the settings and the number of nodes of a run. The lines on standard
output are JSON objects: `note` describes what a run is waiting for, `problem` why it failed, empty if it succeeded.

The app is the same as under Flower; its nodes take turns in this process. Several such processes, one per core, are
faster than one run after the other on Ray, and give the same bits.
"""

import json
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import hyperfl_flwr.core.packages.quick_torch  # noqa: F401
from experiments.attack_cell import run_attack
from experiments.golden import fingerprints, write_fingerprints
from hyperfl_flwr.app.client import app
from hyperfl_flwr.app.server import run
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.errors import DivergedError, HyperFLError
from hyperfl_flwr.launch.core_locks import WAITING, CoreSlots
from hyperfl_flwr.launch.node_numbers import check_given_nodes, suitable_for_reduction
from hyperfl_flwr.models.provenance import find_sources, use_weights
from hyperfl_flwr.server.in_process_grid import InProcessGrid


def main() -> None:
    """Run the tasks of standard input until it ends."""
    answers, sys.stdout = sys.stdout, sys.stderr  # other output must not mix with the answers
    tasks: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(tasks,), daemon=True).start()

    def answer(**document: str) -> None:
        answers.write(json.dumps(document) + "\n")
        answers.flush()

    while True:
        answer(problem=problem_of(json.loads(tasks.get()), lambda note: answer(note=note)))


def _read(tasks: "queue.SimpleQueue[str]") -> None:
    """Read tasks, and end the process at the end of the input.

    A run in progress ends, too. The input also ends when the parent process is killed (kill -9).
    """
    for line in sys.stdin:
        tasks.put(line)
    os._exit(0)


def problem_of(document: dict[str, Any], on_note: Callable[[str], None]) -> str:
    """Run one task.

    Args:
        document: The task, see `experiments.runner`.
        on_note: Receives a note on what the task is waiting for.

    Returns:
        The reason of a failure; empty if the run succeeded.
    """
    try:
        settings = document["settings"]
        find_sources(settings, Path(settings["resume"]) if settings["resume"] else None)
        config = RunConfig.from_flat(settings)
        golden = fingerprints(config.flat() | document["attack"])  # now: the checkout may change during the run
        use_weights(config.lpm.weights)
        with CoreSlots() as slots:
            threads = 1 if config.threads == "auto" else config.threads
            slots.acquire(threads, lambda: on_note(WAITING))
            if document["attack"]:
                folder = Path(config.output)
                run_attack(config.model_copy(update={"output": ""}), document["attack"], folder)
                write_fingerprints(folder, golden)
                return ""
            _run_federation(config, document["num_nodes"], golden)
    except HyperFLError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - a failure must not stop the next run
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"
    return ""


def _run_federation(config: RunConfig, num_nodes: int, golden: Mapping[str, str]) -> None:
    """Run a cell without an attack, and write the fingerprints of the code, also if it has diverged.

    Args:
        config: The cell's settings.
        num_nodes: The study's number of nodes, which the settings may overrule.
        golden: The fingerprints.
    """
    if config.num_nodes == "auto":
        # With means, any number gives the same results; a robust rule has a node for each client.
        num_nodes = suitable_for_reduction(config, num_nodes)
    else:
        num_nodes = config.num_nodes
        check_given_nodes(config, num_nodes)
    folder = Path(config.resume or config.output)
    try:
        run(InProcessGrid(app, num_nodes, config.flat(), {"simulated": True}), config)
    except DivergedError:  # which is a result
        write_fingerprints(folder, golden)
        raise
    write_fingerprints(folder, golden)


if __name__ == "__main__":
    main()
