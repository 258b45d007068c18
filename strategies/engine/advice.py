"""What a method knows of a run's settings before it starts."""

from collections.abc import Mapping, Sequence

from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.setting_types import Scalar


class Advice:
    """The numbers that a method recommends and the settings that it warns of; none, if it does not say otherwise."""

    @classmethod
    def automatic(cls, config: RunConfig) -> Mapping[str, Scalar]:
        """Return what `auto` becomes in the method's own settings, by key.

        Args:
            config: The run's settings; `learning-rate` is a number.
        """
        return {}

    @classmethod
    def warnings(cls, config: RunConfig) -> Sequence[str]:
        """Return what people should know of a run's settings before the first round.

        Args:
            config: The run's settings without any `auto` of the method's.
        """
        return ()
