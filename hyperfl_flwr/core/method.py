"""What a method's row says: its names, what its clients upload, and where its two sides are."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from hyperfl_flwr.core.settings import Section

S = TypeVar("S", bound=Section)

Part = Literal["model", "kept-model", "extractor", "hypernetwork", "encoder", "generator"]
"""What an upload is about.

`model`: the whole target network, from parameters that the server has sent. `kept-model`: the whole target network that
a client keeps from round to round; the server has not sent it. `extractor`: its feature extractor. `hypernetwork`: one
that makes the extractor of the client's embedding. `encoder`: one that makes a descriptor of the client's samples.
`generator`: one that makes samples."""

Form = Literal["values", "increase", "decrease", "gradient"]
"""What is sent of it: its parameters after local training; after minus before; before minus after; the gradient of the
client's loss."""


class Settings(Protocol):
    """What an upload may depend on: the settings of a run, see `hyperfl_flwr.config.run_config.RunConfig`."""

    @property
    def num_rounds(self) -> int:
        """Number of rounds."""

    def section(self, kind: type[S]) -> S:
        """Return the settings of one section."""


@dataclass(frozen=True, kw_only=True)
class Upload:
    """A part of what a client sends in a round.

    Attributes:
        part: What it is about.
        form: What is sent of it.
        separate_start: Whether clients start from different parameters, so that the sum of their uploads tells nothing.
        sent: Whether it is sent with some settings, in a round from 1 on.
    """

    part: Part
    form: Form
    separate_start: bool = False
    sent: Callable[[Settings, int], bool] = lambda settings, server_round: True


@dataclass(frozen=True, kw_only=True)
class Method:
    """A federated learning method.

    Attributes:
        name: Value of the setting `method`.
        title: One line.
        paper: Citation.
        leaves: What leaves a client in a round, in words.
        uploads: The same for attacks, which match on it.
        learning_rate: `learning-rate` where that is `auto`: one that is sound for all data sets, chosen on held-back
            training data (`hyperfl study tuning`).
        client: The clients' side, as `package.module:Class`; a `clients.engine.base.BaseClient`.
        strategy: The server's side, likewise; a `strategies.engine.base.BaseStrategy`.
        settings: The sections of its own settings; methods may share one.
    """

    name: str
    title: str
    paper: str
    leaves: str
    uploads: tuple[Upload, ...]
    learning_rate: float
    client: str
    strategy: str
    settings: tuple[type[Section], ...] = ()

    def sent(self, settings: Settings, server_round: int) -> list[Upload]:
        """Return what is uploaded with some settings, in a round from 1 on."""
        return [upload for upload in self.uploads if upload.sent(settings, server_round)]
