"""Show people where long values of several nodes differ."""

from collections.abc import Sequence

from hyperfl_flwr.protocol.messages import printable

LONGEST = 300
"""Largest number of characters that are shown of a value."""

LEAD = 40
"""Number of characters that are shown before the first difference of long values."""


def excerpts(values: Sequence[str]) -> list[str]:
    """Return untrusted values as texts for people; long ones from shortly before their first difference on.

    Args:
        values: Two or more values that differ.
    """
    if max(map(len, values)) <= LONGEST:
        return [printable(value) for value in values]
    same = next((place for place, letters in enumerate(zip(*values, strict=False)) if len(set(letters)) > 1), 0)
    start = max(0, same - LEAD)
    return [printable(f"{'... ' * (start > 0)}{value[start : start + LONGEST]} ...") for value in values]
