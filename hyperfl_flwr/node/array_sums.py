"""Sums of the shared arrays of a node's clients: as the server sees them, or encoded for a secure sum.

The number of nodes does not change any bit of the sum over all nodes, see `hyperfl_flwr.protocol.reproducible_sum` and
`hyperfl_flwr.protocol.secure_sums.encoding`.
"""

from collections.abc import Mapping
from functools import cached_property

from hyperfl_flwr.protocol.arrays import SharedArrays, Uploads, all_formed
from hyperfl_flwr.protocol.messages import Reduction, Request
from hyperfl_flwr.protocol.reproducible_sum import ReproducibleSum
from hyperfl_flwr.protocol.secure_sums.encoding import Encoding, is_running_statistic
from hyperfl_flwr.protocol.update_norms import noise_norms, norms_of_change, reference_norms, refuse_long

MOST_CUT_OFF = 1e-3
"""Largest share of the elements of each of a client's arrays that may be cut off. What is left of such an element is
the client's weight with a sign: of clients with different weights, a sum of many such elements tells the signs of each.
Running statistics of BatchNorm, which can move far in a first round, only count among all elements."""


class PlainSum:
    """Sum that the server sees as it is; keeps the first client's arrays unchanged until a second one.

    Args:
        received: Arrays that all clients received.
        reductions: Reduction of each shared group.
        request: The request, of which two numbers affect the rounding.
    """

    def __init__(self, received: SharedArrays, reductions: Mapping[str, Reduction], request: Request) -> None:
        rounding = {"num_clients": request.num_clients, "max_num_examples": request.max_num_examples}
        self._total = ReproducibleSum(received, reductions, **rounding)
        self._waiting: list[tuple[Uploads, int]] = []
        self._count = 0

    def add(self, arrays: Uploads, num_examples: int) -> None:
        """Add the arrays of one more client; see `ArraySum`."""
        # A single client's float32 arrays are sent as they are: exact, and half the bytes of a float64 sum.
        self._waiting.append((arrays, num_examples))
        self._count += 1
        while self._count > 1 and self._waiting:
            self._total.add(*self._waiting.pop(0))

    @property
    def arrays(self) -> SharedArrays:
        """Arrays of a single client, or the weighted sums over several; empty without a client."""
        return all_formed(self._waiting[0][0]) if self._waiting else self._total.sums(0)

    @property
    def outliers(self) -> dict[int, SharedArrays]:
        """Sums of the terms that are too large for `arrays`, by level."""
        return {level: self._total.sums(level) for level in self._total.levels if level}


class EncodedSum:
    """Sum of encoded arrays, to be masked.

    Args:
        encoding: Encoding of the step.
        max_ratio: Largest norm of a group's change, relative to the norm of the group that was received; 0 for no
            bound. The server cannot check single clients, so the node does.
        noise: Standard deviation of the noise in each element of a client's change; it does not count as change.
        cuts_off: Whether a share of `MOST_CUT_OFF` of a client's elements may be beyond the range of the encoding, and
            is cut off; otherwise no element may be. A client with more is refused.

    Attributes:
        vector: The sum, uint32 [P].
        num_examples: Sum of the clients' training samples, each at most the encoding's `max_examples`.
        saturated: Number of saturated elements.
    """

    def __init__(self, encoding: Encoding, max_ratio: float, noise: float = 0.0, *, cuts_off: bool = True) -> None:
        self.vector, self.num_examples, self.saturated = encoding.new_sum(), 0, 0
        self._encoding, self._max_ratio = encoding, max_ratio
        self._share = MOST_CUT_OFF if cuts_off else 0.0
        self._noise = noise_norms(encoding.received, noise) if noise else None

    def add(self, arrays: Uploads, num_examples: int) -> None:
        """Encode and add the arrays of one more client; see `ArraySum`."""
        arrays = all_formed(arrays)  # the encoding rounds each client's elements for itself
        if self._encoding.noise:
            self._encoding.noise.refuse_long(arrays, self._encoding.received)
        if self._max_ratio:
            changes = norms_of_change(arrays, self._encoding.received, self._encoding.reductions)
            refuse_long(changes, self._references, self._max_ratio, self._noise)
        saturated = self._encoding.add(self.vector, arrays, num_examples)
        if saturated and self._cuts_off_too_many(arrays, saturated):
            self._encoding.remove(self.vector, arrays, num_examples)
            raise ValueError(
                f"{saturated} elements of its upload are beyond the range of a secure sum, but of each array only a "
                f"share of {self._share:g} may be cut off; raise secagg.range, or lower the learning rate"
            )
        self.saturated += saturated
        self.num_examples += min(num_examples, self._encoding.max_examples)

    def _cuts_off_too_many(self, arrays: SharedArrays, saturated: int) -> bool:
        if saturated > self._share * self._encoding.size:
            return True
        counts = self._encoding.cut_off(arrays)
        return any(
            count > self._share * arrays[key].size for key, count in counts.items() if not is_running_statistic(key)
        )

    @cached_property
    def _references(self) -> Mapping[str, float]:
        """The reference norms of the groups, computed once for all clients."""
        return reference_norms(self._encoding.received)
