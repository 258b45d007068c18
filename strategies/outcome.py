"""What came of one phase of a round."""

from dataclasses import dataclass, field

from hyperfl_flwr.messages import ClientResult, Failure


@dataclass(kw_only=True)
class Outcome:
    """What came of one phase (training or evaluation) of a round.

    Attributes:
        results: Clients that finished, by ascending id.
        failures: Clients that did not.
        bytes_down: A client's own payload from the server: the arrays of its message.
        bytes_up: A client's own payload to the server.
        bytes_on_wire: Serialised contents of all messages and replies between the server and its nodes.
        processes: Peak memory in bytes of the other processes that ran clients, by machine and process id.
    """

    results: list[ClientResult] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    bytes_down: int = 0
    bytes_up: int = 0
    bytes_on_wire: int = 0
    processes: dict[str, int] = field(default_factory=dict)
