"""Plan runs and train them in this process, whose nodes take turns; the program of `InProcessEngine`'s process.

Requests and answers are files in the folder that is the first argument, see `hyperfl_flwr.launch.in_process_engine`.
"""

import pickle
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hyperfl_flwr.core.errors import HyperFLError
from hyperfl_flwr.core.files.atomic_files import is_full, unwritable, write_atomically
from hyperfl_flwr.core.packages.quick_imports import quick_imports
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.launch.in_process_engine import POLL_SECONDS, answer_file
from hyperfl_flwr.launch.subprocess_call import call_here


def main() -> None:
    """Answer requests until the supervisor ends this process."""
    folder = Path(sys.argv[1])
    while True:
        number, kind, *arguments = pickle.loads(_next(folder))  # noqa: S301 - from this process's own parent
        found = answer(kind, *arguments)
        sys.stdout.flush()
        sys.stderr.flush()
        write_atomically(answer_file(folder, number), pickle.dumps(found))


def answer(kind: str, *arguments: Any) -> object:  # noqa: ANN401 - the functions' arguments
    """Answer a request of `InProcessEngine`.

    Args:
        kind: `call` for a function; `run` for a run.
        *arguments: The function, as `package.module:function`, and its arguments; or the run's settings and its number
            of nodes.

    Returns:
        For a function, whether it has returned, and its value or the error that the caller raises; for a run the reason
        of its failure, empty if it succeeded.
    """
    return _called(*arguments) if kind == "call" else _problem_of(*arguments)


def _next(folder: Path) -> bytes:
    """Wait for a request, and take it."""
    while True:
        for file in folder.glob("request-*.pickle"):
            request = file.read_bytes()
            file.unlink()
            return request
        time.sleep(POLL_SECONDS)


def _called(name: str, *arguments: object) -> tuple[bool, object]:
    """Return whether a function has returned, and its value or the error that the caller raises."""
    try:
        return True, call_here(name, *arguments)
    except HyperFLError as error:
        return False, error
    except OSError as error:
        if error.filename is None:
            raise
        return False, error


def _problem_of(settings: Mapping[str, Scalar], num_nodes: int) -> str:
    """Train a run and return the reason of its failure; empty if it succeeded."""
    with quick_imports():
        from hyperfl_flwr.app.client import app  # deferred: a function that is called may not need torch
        from hyperfl_flwr.app.server import run
        from hyperfl_flwr.config.run_config import RunConfig
        from hyperfl_flwr.models.provenance import find_sources
        from hyperfl_flwr.server.in_process_grid import InProcessGrid

    try:
        find_sources(settings, Path(str(settings["resume"])) if settings["resume"] else None)
        config = RunConfig.from_flat(settings)
        run(InProcessGrid(app, num_nodes, config.flat(), {"simulated": True}), config)
    except HyperFLError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - reported as the run's problem
        traceback.print_exc()
        if isinstance(error, OSError) and is_full(error):
            return unwritable(Path(str(settings["resume"] or settings["output"])), error)
        return f"{type(error).__name__}: {error}"
    return ""
