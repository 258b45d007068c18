"""Numbers with their nouns."""


def counted(number: int, noun: str, nouns: str = "") -> str:
    """Return a number with its noun: `1 client`, `2,000 clients`.

    Args:
        number: The number.
        noun: The noun.
        nouns: Its plural; empty for the noun with an s.
    """
    return f"{number:,} {noun if number == 1 else nouns or noun + 's'}"
