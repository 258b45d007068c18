"""The setting that keeps the samples of a subject, such as a patient, in one part of the data."""

from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator

from hyperfl_flwr.core.errors import RefusalError
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.data.grouped_split import AUTO, KINDS, NONE, parse_grouping

Grouping = Annotated[str, AfterValidator(parse_grouping)]
"""`auto`, `none`, `folder`, or a regular expression with one group."""

OwnersGrouping = Annotated[str, AfterValidator(lambda value: value and parse_grouping(value))]
"""The same, or an empty text."""


def owners_grouping(run_config: Mapping[str, Scalar], *, simulated: bool) -> str:
    """Return the setting `data.group-by` on a node whose owner has not given it; empty to keep the run's.

    A server cannot switch off the groups that a file names.

    Args:
        run_config: The run's settings.
        simulated: Whether the node has no owner.

    Raises:
        RefusalError: If the server names a pattern: searching one can take arbitrarily long, and its matches decide how
            the owner's data are divided.
    """
    given = run_config.get("data.group-by", AUTO)
    if simulated:
        return ""
    if given not in KINDS:
        raise RefusalError(
            "the run's data.group-by is a pattern; only each node's owner may give one, as group-by in node.toml (the "
            "node config)"
        )
    return AUTO if given == NONE else ""
