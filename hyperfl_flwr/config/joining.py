"""Settings of a run that a client takes over when it joins the finished run."""

from collections.abc import Mapping

from hyperfl_flwr.config.run_config import RunConfig, default_settings
from hyperfl_flwr.core.setting_types import Scalar

INHERITED = (
    "method", "seed", "target", "local-epochs", "batch-size", "learning-rate", "momentum", "weight-decay",
    "hyperfl.", "fedrep.", "ppsgd.", "pfedhn.local-steps", "pfedhn.clip-norm",
)  # fmt: skip
"""Settings that a joining client takes from the run: names, and sections that end with a dot. No paths are among them,
since they belong to the operator's machine."""


def inherited(settings: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Return those of a run's settings that a joining client takes from it."""
    return {
        key: value
        for key, value in settings.items()
        if any(key == name or (name.endswith(".") and key.startswith(name)) for name in INHERITED)
    }


def joining_config(settings: Mapping[str, Scalar]) -> RunConfig:
    """Return the settings of a joining client: the run's settings in `INHERITED`, and defaults for all others.

    Raises:
        ConfigError: If one of them has a wrong value.
    """
    return RunConfig.from_flat(default_settings() | inherited(settings))
