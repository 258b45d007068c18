"""Runs the app's nodes one after the other in this process: `python -P -m experiments.in_process_app SETTINGS NODES`.

`SETTINGS` is a TOML file of all settings. If the run fails, the reason is written beside it
(`experiments.in_process_run.problem_file`).
"""

import sys
import tomllib
from pathlib import Path

from experiments.in_process_run import problem_file
from hyperfl_flwr.client_app import app
from hyperfl_flwr.config import RunConfig
from hyperfl_flwr.errors import HyperFLError
from hyperfl_flwr.in_process import InProcessGrid
from hyperfl_flwr.methods import METHODS
from hyperfl_flwr.own_model import find_model
from hyperfl_flwr.server_app import run


def main() -> int:
    """Run the federation; returns the exit code."""
    settings, num_nodes = Path(sys.argv[1]), int(sys.argv[2])
    try:
        config = RunConfig.from_flat(tomllib.loads(settings.read_text()), methods=METHODS)
        find_model(config.target, Path(config.resume) if config.resume else None)
        run(InProcessGrid(app, num_nodes, config.flat(), {"simulated": True}), config)
    except HyperFLError as error:
        problem_file(settings).write_text(str(error))
        return error.exit_code
    except Exception as error:
        problem_file(settings).write_text(f"{type(error).__name__}: {error}")
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main())
