"""Recorded observations of a round, read from their files on access."""

from collections.abc import Sequence
from pathlib import Path
from typing import overload

from hyperfl_flwr.runs.observation import Observation, load_observation, load_opening, mean_observation


class ObservationFiles(Sequence[Observation]):
    """Recorded observations, read on access: one of a hypernetwork takes 120 MB.

    Args:
        paths: Files of the observations.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths

    @overload
    def __getitem__(self, index: int) -> Observation: ...
    @overload
    def __getitem__(self, index: slice) -> "ObservationFiles": ...
    def __getitem__(self, index: int | slice) -> "Observation | ObservationFiles":
        """Read one observation, or return a part of the sequence."""
        return self.part(index) if isinstance(index, slice) else self.read(self.paths[index])

    def part(self, index: slice) -> "ObservationFiles":
        """Return a part of the observations."""
        return ObservationFiles(self.paths[index])

    def read(self, path: Path) -> Observation:
        """Read an observation."""
        return load_observation(path)

    def mean(self) -> Observation:
        """Return what a server observes that receives only the sum of all replies."""
        return mean_observation(self)

    @property
    def clients(self) -> list[int]:
        """Ids of the observed clients."""
        return [observation.client for observation in self]

    def __len__(self) -> int:
        return len(self.paths)


class OpeningFiles(ObservationFiles):
    """What the server opened in a round of a run with secure sums: one observation, which is a mean.

    Args:
        paths: The file of the opening.
    """

    def part(self, index: slice) -> "OpeningFiles":
        """Return a part of the openings."""
        return OpeningFiles(self.paths[index])

    def read(self, path: Path) -> Observation:
        """Read an opening."""
        return load_opening(path)[0]

    def mean(self) -> Observation:
        """Return the opening."""
        (opening,) = self
        return opening

    @property
    def clients(self) -> list[int]:
        """Ids of the clients in the sum."""
        (path,) = self.paths
        return load_opening(path)[1]
