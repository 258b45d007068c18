"""Record what a run releases about whole clients, on the server: `privacy.jsonl` in the run's folder.

A line is on disk before the release is sent or opened. A resumed run keeps the lines, so that a round that is repeated
counts twice: it is released with other noise.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from hyperfl_flwr.core.errors import StateError
from hyperfl_flwr.privacy.accounting import Noise

FILE = "privacy.jsonl"
"""Name of the record in a run's folder."""


@dataclass(frozen=True, kw_only=True)
class SumRelease:
    """One noisy sum of clients' changes, or the uploads of a round, of which each number is randomised.

    Attributes:
        round: The federated round.
        noise: Where the noise was added, see `PrivacyConfig.noise`.
        noise_multiplier: Standard deviation of the noise in units of the clipping norm: on each upload (`local`), or on
            the sum.
        clip_norm: The clipping norm.
        crowd: Least number of honest clients in the sum; 1 where the server sees single uploads.
        weights: Number of randomised numbers of an upload; 0 if the noise is as above.
        weight_epsilon: Epsilon of each of them.
    """

    round: int
    noise: Noise
    noise_multiplier: float
    clip_norm: float
    crowd: int
    weights: int = 0
    weight_epsilon: float = 0.0


def record_release(run: Path, release: SumRelease) -> None:
    """Add a line; it is on disk when this returns.

    Raises:
        OSError: If it cannot be written; then nothing may be released.
    """
    with (run / FILE).open("a+b") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)  # of a process that was killed while it wrote
        found = {name: value for name, value in asdict(release).items() if release.weights or "weight" not in name}
        file.write(json.dumps(found).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def read_releases(run: Path) -> list[SumRelease]:
    """Return the releases of a run, in their order; an incomplete last line was followed by none.

    Raises:
        StateError: If a line is damaged.
    """
    path = run / FILE
    if not path.is_file():
        return []
    found = []
    for number, line in enumerate(path.read_text().splitlines(keepends=True), start=1):
        if line.endswith("\n"):
            try:
                found.append(SumRelease(**json.loads(line)))
            except (ValueError, TypeError):
                raise StateError(
                    f"line {number} of {path} is damaged, so that the run's epsilon is unknown; restore it from a copy"
                ) from None
    return found
