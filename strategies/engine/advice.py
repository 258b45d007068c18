"""Optional interface of strategies: recommend settings and warn of them before a run starts."""

from collections.abc import Mapping, Sequence

from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.setting_types import Scalar


class Advice:
    """Values of `auto` and warnings of a method; there are none by default."""

    @classmethod
    def automatic(cls, config: RunConfig) -> Mapping[str, Scalar]:
        """Return the values that replace `auto` in the method's settings, by key.

        Args:
            config: The run's settings; `learning-rate` is a number.
        """
        return {}

    @classmethod
    def warnings(cls, config: RunConfig) -> Sequence[str]:
        """Return warnings about a run's settings, to print before the first round.

        Args:
            config: The run's settings, with the method's `auto` values replaced.
        """
        return ()
