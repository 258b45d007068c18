"""Description of a method: its names, its clients' uploads, and its client and strategy classes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.core.settings import Section
from hyperfl_flwr.core.tasks import CLASSIFICATION

S = TypeVar("S", bound=Section)

Part = Literal[
    "model", "kept-model", "layers", "extractor", "classifier", "hypernetwork", "encoder", "generator", "control"
]
"""Part of the model or state that an upload describes.

`model`: the whole target network, from parameters that the server has sent. `kept-model`: the whole target network that
a client keeps from round to round; the server has not sent it. `layers`: the whole target network without its
normalisation layers. `extractor`: its feature extractor. `classifier`: its last layer. `hypernetwork`: it generates the
extractor from the client's embedding. `encoder`: it computes a descriptor of the client's samples. `generator`: it
generates samples. `control`: a mean gradient of the whole target network, minus one that the server has sent."""

Form = Literal["values", "increase", "decrease", "gradient"]
"""Form of an upload: parameters after local training; after minus before; before minus after; or the gradient of the
client's loss."""


class Settings(Protocol):
    """Settings of a run that an upload may depend on, see `hyperfl_flwr.config.run_config.RunConfig`."""

    @property
    def num_rounds(self) -> int:
        """Number of rounds."""

    def section(self, kind: type[S]) -> S:
        """Return the settings of one section."""


@dataclass(frozen=True, kw_only=True)
class Upload:
    """A part of what a client sends in a round.

    Attributes:
        part: Part of the model or state that the upload describes.
        form: Form in which it is sent.
        separate_start: Whether clients start from different parameters, so that the sum of their uploads reveals
            nothing about one of them.
        is_sent: Returns whether it is sent with some settings, in a round from 1 on.
    """

    part: Part
    form: Form
    separate_start: bool = False
    is_sent: Callable[[Settings, int], bool] = lambda settings, server_round: True


@dataclass(frozen=True, kw_only=True)
class Method:
    """A federated learning method.

    Attributes:
        name: Value of the setting `method`.
        title: Description in one line.
        paper: Citation.
        sends: Description of the data that a client sends in a round.
        keeps: Description of the parameters that stay with a client.
        uploads: The same data in a form that the attacks match on.
        learning_rate: Value of `learning-rate` = `auto`: one that suits all data sets, chosen on held-back training
            data (`hyperfl study tuning`).
        client: The client class as `package.module:Class`; a `clients.engine.base.BaseClient`.
        strategy: The strategy class as `package.module:Class`; a `strategies.engine.base.BaseStrategy`.
        settings: Sections of settings that belong to the method; methods may share one.
        targets: Returns the names of the clients' target networks, by client id modulo their number; empty if all
            clients train `target`.
        private_classifier: Whether clients train a private classifier beside what they send, so that `dp.heads` decides
            whether it is trained without noise.
        tasks: Names of the tasks that the method can train, see `hyperfl_flwr.core.tasks`.
        measures_state: Returns whether the accuracy `aggregate` of every round is of the state after it, with some
            settings by key; else only that after the last round is.
        weight_epsilon: Returns the epsilon of local differential privacy of each number of an upload, with some
            settings; None for a method whose clients do not randomise the numbers that they send.
    """

    name: str
    title: str
    paper: str
    sends: str
    keeps: str
    uploads: tuple[Upload, ...]
    learning_rate: float
    client: str
    strategy: str
    settings: tuple[type[Section], ...] = ()
    targets: Callable[[Settings], Sequence[str]] = lambda settings: ()
    private_classifier: bool = False
    tasks: tuple[str, ...] = (CLASSIFICATION.name,)
    measures_state: Callable[[Mapping[str, Scalar]], bool] = lambda settings: True
    weight_epsilon: Callable[[Settings], float] | None = None

    def active_uploads(self, settings: Settings, server_round: int) -> list[Upload]:
        """Return the uploads that are sent with some settings, in a round from 1 on."""
        return [upload for upload in self.uploads if upload.is_sent(settings, server_round)]
