"""The parameters of the next round, as a strategy's `advance` has returned them."""

from collections.abc import Mapping

import numpy as np

from hyperfl_flwr.core.errors import RunFailedError
from hyperfl_flwr.core.similar_names import nearest
from hyperfl_flwr.protocol.arrays import SharedArrays
from hyperfl_flwr.protocol.messages import group_of


def checked(advanced: object, means: SharedArrays, sent: SharedArrays, strategy: type) -> SharedArrays:
    """Return what `advance` has returned; refuse what clients could not load in the next round.

    Args:
        advanced: The returned object.
        means: The reduced groups that `advance` was given; empty if no client finished.
        sent: The shared groups that the clients of this round received.
        strategy: The strategy's class.

    Raises:
        RunFailedError: If it is no dictionary, or an array is missing, unknown, or of another shape or type.
    """
    function = f"{strategy.__name__}.advance"
    if not isinstance(advanced, Mapping):
        found = "None" if advanced is None else f"a {type(advanced).__name__}"
        raise RunFailedError(f"{function} must return a dictionary with an array for each key of `means`, got {found}")
    if missing := [key for key in means if key not in advanced]:
        raise RunFailedError(f"{function} returned no {missing[0]}; return an array for each key of `means`")
    # Groups that this round has not sent, as those of another phase, are not known here.
    groups = set(map(group_of, sent))
    if unknown := [key for key in advanced if key not in sent and group_of(key) in groups]:
        meant = nearest(unknown[0], sent)
        raise RunFailedError(f"{function} returned {unknown[0]}, which clients do not receive; leave it out{meant}")
    for key in (each for each in sent if each in advanced):
        given, wanted = np.asarray(advanced[key]), sent[key]
        for kind, got, expected in (
            ("shape", given.shape, wanted.shape),
            ("type", given.dtype, wanted.dtype),
        ):
            if got != expected:
                raise RunFailedError(
                    f"{function} returned {key} with the {kind} {got}, expected {expected} as in `means`; convert it"
                )
    return dict(advanced)
