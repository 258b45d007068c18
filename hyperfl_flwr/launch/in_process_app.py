"""Run the app's nodes one after the other in this process.

Called as `python -P -m hyperfl_flwr.launch.in_process_app SETTINGS NODES`, where `SETTINGS` is a TOML file of all
settings. If the run fails, the reason is written to `hyperfl_flwr.launch.in_process_run.problem_file`.
"""

import sys
import tomllib
from pathlib import Path

from hyperfl_flwr.app.client import app
from hyperfl_flwr.app.server import run
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.errors import HyperFLError
from hyperfl_flwr.launch.in_process_run import problem_file
from hyperfl_flwr.models.provenance import find_model
from hyperfl_flwr.server.in_process_grid import InProcessGrid


def main() -> int:
    """Run the federation; returns the exit code."""
    settings, num_nodes = Path(sys.argv[1]), int(sys.argv[2])
    try:
        config = RunConfig.from_flat(tomllib.loads(settings.read_text()))
        find_model(config.target, config.lpm.weights, Path(config.resume) if config.resume else None)
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
