"""Checked runs as plain records, so that a process that only starts and follows a run need not import torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.launch.ray_cluster.hosts import Cluster


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run with checked settings, see `hyperfl_flwr.launch.planning`.

    Attributes:
        settings: All settings by dotted key, with an absolute folder.
        sources: Files or folders of a network and a method of the user's own to send with the app.
        warnings: Warnings to show before the run starts.
    """

    settings: Mapping[str, Scalar]
    sources: Sequence[Path] = ()
    warnings: Sequence[str] = ()

    @property
    def method(self) -> str:
        """The method's name."""
        return str(self.settings["method"])

    @property
    def num_rounds(self) -> int:
        """Number of federated rounds."""
        return int(self.settings["num-rounds"])

    @property
    def directory(self) -> Path:
        """The run's folder."""
        return Path(str(self.settings["resume"] or self.settings["output"]))


Engine = Literal["auto", "ray", "in-process"]
"""The engines: Flower's simulation engine on Ray, or all nodes one after the other in one process without ports; `auto`
is the one that is likely to end sooner, see `hyperfl_flwr.launch.engine_choice`."""

AUTO: Final = "auto"
RAY: Final = "ray"
IN_PROCESS: Final = "in-process"


@dataclass(frozen=True, kw_only=True)
class SimulationPlan(Plan):
    """A simulation with checked settings.

    Attributes:
        num_nodes: Number of simulated nodes P.
        threads: torch threads of each process, as in the settings.
        device: Device on which the clients train, `cpu` or `cuda`.
        num_gpus: Number of GPUs of the machine or cluster; 0 for training on the CPU.
        data: Description of the data, for the user.
        chosen_for: Machine for which nodes or threads were chosen; empty if the caller gave both.
        engine: `RAY` or `IN_PROCESS`.
        cluster: The Ray cluster on which the nodes train; None for this machine.
    """

    num_nodes: int
    threads: int
    device: str
    num_gpus: int
    chosen_for: str
    data: str = ""
    engine: str = RAY
    cluster: Cluster | None = None
