"""The setting that keeps the samples of a subject, such as a patient, in one part of the data."""

from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator

from hyperfl_flwr.core.errors import RefusalError
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.data.grouped_split import KINDS, parse_grouping

Grouping = Annotated[str, AfterValidator(parse_grouping)]
"""`auto`, `none`, `folder`, or a regular expression with one group."""


def owners_grouping(run_config: Mapping[str, Scalar], *, simulated: bool) -> str:
    """Return the setting `data.group-by` on a node whose owner has not given it; empty to keep the run's.

    Args:
        run_config: The run's settings.
        simulated: Whether the node has no owner.

    Raises:
        RefusalError: If the server names a pattern: searching one can take arbitrarily long, and its matches decide how
            the owner's data are divided.
    """
    if not simulated and run_config.get("data.group-by", KINDS[0]) not in KINDS:
        raise RefusalError(
            "the run's data.group-by is a pattern; only each node's owner may give one, as group-by in the node config"
        )
    return ""
