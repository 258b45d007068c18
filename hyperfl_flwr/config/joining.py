"""Settings of a run that a client takes over when it joins the finished run."""

from collections.abc import Mapping

from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.config.table import with_defaults
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.methods import METHODS

INHERITED = (
    "method", "seed", "target", "local-epochs", "batch-size", "learning-rate", "momentum", "weight-decay",
    "class-weights", "sample-weights", "task", "precision", "deterministic",
)  # fmt: skip
"""Settings that a joining client takes from the run, besides the sections of the run's method. No paths are among them,
since they belong to the operator's machine."""

NOT_INHERITED = ("pfedhn.targets",)
"""Settings of methods that a joining client does not take: it has one network, which is its `target`."""


def inherited(settings: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Return those of a run's settings that a joining client takes from it."""
    method = METHODS.get(str(settings.get("method")))
    sections = {section.key for section in method.settings} if method else set()
    return {
        key: value
        for key, value in settings.items()
        if (key in INHERITED or key.partition(".")[0] in sections) and key not in NOT_INHERITED
    }


def joining_config(settings: Mapping[str, Scalar]) -> RunConfig:
    """Return the settings of a joining client: those of `inherited`, and defaults for all others.

    Raises:
        ConfigError: If one of them has a wrong value.
    """
    return RunConfig.from_flat(with_defaults(inherited(settings)))
