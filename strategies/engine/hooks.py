"""Hooks of a method's server: a strategy overrides those that it needs."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from numpy.typing import NDArray

from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.protocol.arrays import SharedArrays


class Hooks:
    """The hooks of strategies; their defaults only average.

    Attributes:
        novel_modes: Modes in which a novel client gets a model, see `strategies.novel.assess`.
        remembered: Arrays of the method's server that a checkpoint holds, by name.
        remarks: Warnings about the round, which are shown at its end.
        descriptor_dimension: Length d of the descriptor that a novel client sends in the mode `descriptor`.
    """

    novel_modes: ClassVar[tuple[str, ...]] = ()
    descriptor_dimension = 0
    remembered: SharedArrays
    remarks: list[str]

    @classmethod
    def automatic(cls, config: RunConfig) -> Mapping[str, Scalar]:
        """Return the values that replace `auto` in the method's settings, by key.

        Args:
            config: The run's settings; `learning-rate` is a number.
        """
        return {}

    @classmethod
    def steps_setting(cls, num_steps: int) -> Mapping[str, Scalar]:
        """Return the setting for a number of local steps, if the method has one instead of `local-epochs`."""
        return {}

    @classmethod
    def only_round(cls) -> Mapping[str, Scalar]:
        """Return the settings with which clients upload all shared groups in a run of one round."""
        return {}

    @classmethod
    def check(cls, config: RunConfig, input_shape: Sequence[int]) -> None:
        """Refuse settings that the method or the data do not allow; types and ranges are checked before.

        Args:
            config: The run's settings.
            input_shape: Shape of a sample: (channels, height, width), or (D,) for feature vectors.

        Raises:
            hyperfl_flwr.core.errors.ConfigError: Naming the setting and what is wrong with it.
        """

    @classmethod
    def check_secure_sum(cls, config: RunConfig) -> None:
        """Refuse settings with which the sum of the clients' uploads can be separated into its parts.

        Args:
            config: The run's settings, with `secagg.enabled`; all shared groups are sums or means.

        Raises:
            hyperfl_flwr.core.errors.ConfigError: Naming the setting, the reason, and what to do instead.
        """

    @classmethod
    def check_robust(cls, config: RunConfig) -> None:
        """Refuse robust rules that do not protect what the method does with its means.

        Args:
            config: The run's settings, with another `robust.reduction` than `mean`; all shared groups are averaged.

        Raises:
            hyperfl_flwr.core.errors.ConfigError: Naming the setting, the reason, and what to do instead.
        """

    @classmethod
    def warnings(cls, config: RunConfig) -> Sequence[str]:
        """Return warnings about a run's settings, shown before the first round.

        Args:
            config: The run's settings, with the method's `auto` values replaced.
        """
        return ()

    def lighter(self) -> str:
        """Return a note on a method that sends less, for the log of a deployment; empty if none is known."""
        return ""

    def phase(self, server_round: int) -> str:
        """Return the name of a round's training phase; empty if the method has only one phase."""
        return ""

    def per_client_arrays(self, clients: Sequence[int]) -> Mapping[int, SharedArrays]:
        """Return the per-client groups that are sent to each client, keyed `group/name`."""
        return {}

    def update(self, per_client: Mapping[int, SharedArrays], num_examples: Mapping[int, int]) -> None:
        """Update the server's state with what single clients sent that finished a round.

        Args:
            per_client: Each client's arrays of `PER_CLIENT` and `EACH` groups, keyed `group/name`, by ascending id.
            num_examples: Number of training samples of each of these clients.
        """

    def advance(self, means: SharedArrays) -> SharedArrays:
        """Return the shared parameters of the next round; called at the end of every round, after `update`.

        Args:
            means: The summed groups of the clients that finished, reduced, keyed `group/name`; empty if none did.

        Returns:
            The parameters, keyed `group/name`; may be empty if no client finished, which leaves them unchanged. Groups
            that are not summed (`EACH` and `DOWN`) stay as they are if they are left out.
        """
        return means

    def server_state(self) -> SharedArrays:
        """Return the method's state on the server, for the checkpoint; by default `remembered`."""
        return dict(self.remembered)

    def load_server_state(self, arrays: SharedArrays) -> None:
        """Restore a state that `server_state` returned."""
        self.remembered = dict(arrays)

    def models(self, arrays: SharedArrays) -> SharedArrays:
        """Return the M candidate models for a novel client, [M, *shape] by `model/name`.

        Args:
            arrays: The shared parameters.
        """
        return {}

    def models_of(self, descriptors: Mapping[int, NDArray[Any]]) -> Mapping[int, SharedArrays]:
        """Return a model, [1, *shape] by `model/name`, for each novel client that has sent a descriptor [1, d]."""
        return {}
