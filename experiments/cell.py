"""One run of a study, in this process: `python -m experiments.cell`, with its settings as JSON on standard input.

The app is the one that Flower runs; its nodes take turns in this process. Cells of a study run side by side, one per
core, which is faster than one after the other on Ray, and bit-equal to it.
"""

import json
import sys

from experiments.cores import CoreSlots
from hyperfl_flwr.client_app import app
from hyperfl_flwr.config import RunConfig
from hyperfl_flwr.errors import HyperFLError
from hyperfl_flwr.in_process import InProcessGrid
from hyperfl_flwr.methods import METHODS
from hyperfl_flwr.server_app import run


def main() -> int:
    """Run; returns 0, or 1 after printing what went wrong."""
    document = json.load(sys.stdin)
    try:
        config = RunConfig.from_flat(document["settings"], methods=METHODS)
        with CoreSlots() as slots:
            slots.acquire(1)
            run(InProcessGrid(app, document["num_nodes"], config.flat(), {"simulated": True}), config)
    except HyperFLError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
