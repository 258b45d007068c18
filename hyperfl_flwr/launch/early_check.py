"""Check settings without torch, while the process that plans a run is still importing it."""

from collections.abc import Mapping

from hyperfl_flwr.core.packages.user_code import is_user_code
from hyperfl_flwr.core.setting_types import Scalar


def check_early(changes: Mapping[str, Scalar]) -> None:
    """Refuse unknown settings and wrong values in half a second, where planning takes several to import torch.

    Planning checks everything, also what is left out here: settings of a resumed run, which may be of an older version,
    and those of a method of the user's own, which is imported in no process but the planning one.

    Args:
        changes: Settings that differ from the defaults.

    Raises:
        ConfigError: Naming all wrong settings.
    """
    if changes.get("resume") or is_user_code(str(changes.get("method", ""))):
        return
    # Deferred: they take most of the half second, in which the other process imports torch.
    from hyperfl_flwr.config.run_config import RunConfig
    from hyperfl_flwr.config.table import with_defaults

    RunConfig.from_flat(with_defaults(changes))
