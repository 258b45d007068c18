"""Context of a strategy: everything that its rounds depend on."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.protocol.messages import Reduction
from hyperfl_flwr.protocol.secure_sums.header import Phase
from hyperfl_flwr.server.federation import Federation


@dataclass(frozen=True, kw_only=True)
class SecureContext:
    """What the headers of secure steps hold, besides the nodes and arrays.

    Attributes:
        session: Identity of this process, 32 hexadecimal digits, as in the handshake's request.
        settings: Digest of the settings that all nodes receive.
        metric_names: Function from a phase and a round to the names of the metrics that clients report.
    """

    session: str
    settings: str
    metric_names: Callable[[Phase, int], Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class ServerContext:
    """The context of a strategy.

    Attributes:
        config: The run's settings.
        federation: The nodes and the clients that they host.
        reductions: The method's shared groups and how each is reduced.
        experiment: Id of the run.
        run_directory: The server's output folder.
        secure: For secure sums; None if sums are in the clear.
    """

    config: RunConfig
    federation: Federation
    reductions: Mapping[str, Reduction]
    experiment: str
    run_directory: str
    secure: SecureContext | None = None
