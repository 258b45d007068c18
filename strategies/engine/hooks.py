"""What a method's server may do differently: a strategy overrides the hooks that it needs."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from numpy.typing import NDArray

from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.protocol.arrays import SharedArrays


class Hooks:
    """The hooks of strategies and their defaults, with which nothing but averaging is done.

    Attributes:
        ways: The ways in which a client that was never trained gets a model, see `strategies.novel.assess`.
        descriptor_dimension: Length d of what such a client sends of its samples in the way `descriptor`.
    """

    novel_modes: ClassVar[tuple[str, ...]] = ()
    descriptor_dimension = 0

    @classmethod
    def automatic(cls, config: RunConfig) -> Mapping[str, Scalar]:
        """Return what `auto` becomes in the method's own settings, by key.

        Args:
            config: The run's settings; `learning-rate` is a number.
        """
        return {}

    @classmethod
    def steps_setting(cls, num_steps: int) -> Mapping[str, Scalar]:
        """Return the setting that asks for so many local steps, where the method has one instead of `local-epochs`."""
        return {}

    @classmethod
    def only_round(cls) -> Mapping[str, Scalar]:
        """Return the settings with which the only round of a run is one in which clients upload all that they do."""
        return {}

    @classmethod
    def check(cls, config: RunConfig, input_shape: Sequence[int]) -> None:
        """Refuse settings that the method cannot follow, alone or on such data; ranges are checked before.

        Args:
            config: The run's settings.
            input_shape: Of a sample: (channels, height, width), or (D,) of feature vectors.

        Raises:
            hyperfl_flwr.core.errors.ConfigError: Naming the setting and what is wrong with it.
        """

    @classmethod
    def warnings(cls, config: RunConfig) -> Sequence[str]:
        """Return what people should know of a run's settings before the first round.

        Args:
            config: The run's settings without any `auto` of the method's.
        """
        return ()

    def phase(self, server_round: int) -> str:
        """Return the name of the phase of training that a round is part of; empty where there is but one."""
        return ""

    def per_client_arrays(self, clients: Sequence[int]) -> Mapping[int, SharedArrays]:
        """Return what each of some clients is sent alone: its per-client groups, keyed `group/name`."""
        return {}

    def update(self, per_client: Mapping[int, SharedArrays], num_examples: Mapping[int, int]) -> None:
        """Take the per-client groups of the clients that finished a round, by ascending id, into the server's state.

        Args:
            per_client: Each client's arrays.
            num_examples: Their training samples.
        """

    def advance(self, means: SharedArrays) -> SharedArrays:
        """Return the shared parameters of the next round; called at the end of every round, after `update`.

        Args:
            means: The reduced groups of the clients that finished, keyed `group/name`; empty if none did.

        Returns:
            Them, keyed alike; empty, if no client finished, to leave them as they are.
        """
        return means

    def server_state(self) -> SharedArrays:
        """Return the method's own state on the server, for the checkpoint."""
        return {}

    def load_server_state(self, arrays: SharedArrays) -> None:
        """Go back to a state that `server_state` returned."""

    def models(self, arrays: SharedArrays) -> SharedArrays:
        """Return the whole models, [M, *shape] by `model/name`, that the server has for a client that it does not know.

        Args:
            arrays: The shared parameters.
        """
        return {}

    def models_of(self, descriptors: Mapping[int, NDArray[Any]]) -> Mapping[int, SharedArrays]:
        """Return the models, [1, *shape] by `model/name`, of clients that have sent descriptors [1, d]."""
        return {}
