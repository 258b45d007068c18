"""The key of a node config that names the owner's data."""

from collections.abc import Mapping
from typing import Any

from hyperfl_flwr.core.similar_names import nearest
from hyperfl_flwr.data.sample_format import is_local_data, local_data_path, path_hint, placed


def owners_data(value: str, context: Mapping[str, Any] | None) -> str:
    """Return the name of an owner's data with an absolute path; an empty text names none.

    Args:
        value: `npz:FILE`, `csv:FILE`, `folder:PATH` or the name of a data set.
        context: The validation context; its `folder`, if any, is where relative paths start.

    Raises:
        ValueError: If it is none of these.
    """
    if is_local_data(value):
        if str(local_data_path(value)) in (".", "PATH"):
            raise ValueError(f"must name a file after npz: or csv:, or a folder after folder:; got {value!r}")
        kind, _, path = value.partition(":")
        return f"{kind}:{placed(path, context)}"
    if value:
        from hyperfl_flwr.data.registry import DATASETS  # deferred: imports numpy, which listing settings does not need

        if value not in DATASETS:
            hint = path_hint(value) or nearest(value, DATASETS) or f"; for a folder of images write folder:{value}"
            raise ValueError(f"must be npz:FILE, csv:FILE, folder:PATH or a data set; got {value!r}{hint}")
    return value
