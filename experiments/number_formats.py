"""Formats of the numbers in tables of the documentation."""

import re
from collections.abc import Callable

Format = Callable[[float], str]


def in_percent(value: float) -> str:
    """Format a share in percent with a digit after the point."""
    return f"{100 * value:.1f}"


def in_mb(value: float) -> str:
    """Format bytes in units of 10^6 with two digits after the point."""
    return f"{value / 1e6:.2f}"


def one_digit(value: float) -> str:
    """Format a number with a digit after the point."""
    return f"{value:.1f}"


def two_digits(value: float) -> str:
    """Format a number with two digits after the point."""
    return f"{value:z.2f}"


def three_digits(value: float) -> str:
    """Format a number with three digits after the point."""
    return f"{value:.3f}"


def short(value: float) -> str:
    """Format a number with three digits."""
    return f"{value:.3g}"


def short_version(version: str) -> str:
    """Return a version of the code, see `code_versions`, with seven digits of its commit."""
    return re.sub(r"^([0-9a-f]{7})[0-9a-f]{5}", r"\1", version)
