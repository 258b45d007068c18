"""What a method knows of a run's settings before it starts."""

from collections.abc import Mapping, Sequence

from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.setting_types import Scalar


class Advice:
    """The numbers that a method recommends, the settings that it refuses, and those that it warns of; none here."""

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
