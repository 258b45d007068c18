"""Compare PRIV-HFL's dual averaging on toy problems with predictions: `python -m experiments.dual.convergence`.

Two measurements of `experiments.dual.measures`, each written as a picture and as a JSON file with its numbers:

- `dual-convergence`: the largest distance of a client from the optimum over the rounds, with dual steps just below and
  just above the predicted stability limit, and with sigma > 0, where it must converge to the biased fixed point.
- `dual-rates`: the growth per round of an error in a direction of one curvature, against the dual step.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from experiments.dual.measures import curves, rates
from experiments.dual.pictures import draw_curves, draw_rates


def main() -> None:
    """Measure, draw and write the results; prints the files' paths."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="folder of the pictures and numbers")
    parser.add_argument("--rounds", type=int, default=3000, help="number of rounds of the curves")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    found, growths = list(curves(options.rounds)), list(rates())
    names = ("convergence.png", "convergence.json", "rates.png", "rates.json")
    files = [options.output / f"dual-{name}" for name in names]
    draw_curves(found, files[0])
    _write(({**vars(growth), "distances": growth.envelope} for growth in found), files[1])
    draw_rates(growths, files[2])
    _write(map(vars, growths), files[3])
    for path in files:
        sys.stdout.write(f"{path}\n")


def _write(rows: Iterable[Mapping[str, object]], path: Path) -> None:
    """Write one line per row, with infinity as a text since JSON has no infinity."""
    finite = ({key: "infinity" if value == math.inf else value for key, value in row.items()} for row in rows)
    path.write_text("[\n" + ",\n".join(map(json.dumps, finite)) + "\n]\n")


if __name__ == "__main__":
    main()
