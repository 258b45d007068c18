"""Say what training an attacker observes: the local steps and images of the attacked clients."""

from collections.abc import Sequence

from hyperfl_flwr.audit.record_round import AttackedRound

WHOLE_ROUND = 100
"""Number of training samples from which a client's local training counts as a whole round."""


def threat(target: AttackedRound) -> str:
    """Describe the training that the attacker observes, as text: steps, images, and whether they are summed."""
    steps, samples = span(target.steps), span(target.sizes)
    images = "1 image" if samples == "1" else f"{samples} images"
    if target.summed:
        images += f", seen as the sum of {len(target.clients)} clients"
    if target.by_neighbours:
        images += ", seen by the next client of the chain"
    if target.malicious_server:
        images += ", with forged weights from a malicious server"
    if steps == "1":
        return f"one step on {images}"
    if max(target.sizes) < WHOLE_ROUND:
        return f"several steps ({steps} on {images})"
    return f"a whole round ({steps} steps on {images})"


def span(numbers: Sequence[int]) -> str:
    """Return the number that all clients have, or from the smallest to the largest: `40`, `3 to 40`."""
    least, most = min(numbers), max(numbers)
    return str(most) if least == most else f"{least} to {most}"


def common(numbers: Sequence[int]) -> int | list[int]:
    """Return the number that all clients have, or the numbers of all if they differ."""
    return numbers[0] if len(set(numbers)) == 1 else list(numbers)


def each(value: int | list[int], number: int) -> list[int]:
    """Return the numbers of all clients, the inverse of `common`."""
    return value if isinstance(value, list) else [value] * number
