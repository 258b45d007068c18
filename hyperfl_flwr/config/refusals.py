"""Say in one text which settings pydantic has refused, and why."""

from collections.abc import Mapping, Sequence

from pydantic_core import ErrorDetails

from hyperfl_flwr.core.similar_names import nearest

OF_YOUR_OWN = "; a method of your own has its settings with method = module:NAME only"
"""What is said of a setting below an unknown name that is not similar to a known one."""


def explain(details: Sequence[ErrorDetails], known: Sequence[str], hint: str = "") -> str:
    """Return an error message for settings that pydantic has refused, with one line for each wrong key.

    Args:
        details: Pydantic's errors.
        known: All known keys, with a dot between section and name.
        hint: Text after an unknown key that is not similar to a known one; empty for a list of the known keys.
    """
    hint = hint or f"; known are {', '.join(known)}"
    problems: dict[str, list[str]] = {}
    given: dict[str, str] = {}
    for detail in details:
        # A union (auto | number) reports an error for each of its branches, at a location below the key.
        path = [str(part) for part in detail["loc"]]
        parts = [".".join(path[:end]) for end in range(len(path), 0, -1)]
        key = next((part for part in parts if part in known), ".".join(path))
        if detail["type"] == "extra_forbidden" and isinstance(detail["input"], Mapping):  # an unknown section
            for name in detail["input"]:
                problems[f"{key}.{name}"] = [_unknown(f"{key}.{name}", known, hint + OF_YOUR_OWN)]
            continue
        problems.setdefault(key, []).append(_problem(detail, key, known, hint))
        if detail["type"] not in ("missing", "value_error", "extra_forbidden"):
            given[key] = f"; got {detail['input']!r}"
    lines = [f"{key} {_alternatives(parts)}{given.get(key, '')}".strip() for key, parts in problems.items()]
    if len(lines) == 1:
        return lines[0]
    return "\n".join([f"{len(lines)} settings are wrong:", *(f"  - {line}" for line in lines)])


def _alternatives(parts: Sequence[str]) -> str:
    """Return the problems of a union's branches as one: `must be 'auto' or a valid integer`."""
    first, *others = parts
    if first.startswith("must be "):
        others = [other.removeprefix("must be ") for other in others]
    return " or ".join([first, *others])


def _unknown(key: str, known: Sequence[str], hint: str) -> str:
    return f"is unknown{nearest(key, known) or hint}"


def _problem(detail: ErrorDetails, key: str, known: Sequence[str], hint: str) -> str:
    if detail["type"] == "missing":
        return "is missing"
    if detail["type"] == "extra_forbidden":
        return _unknown(key, known, hint)
    if detail["type"] == "value_error":
        return str(detail["ctx"]["error"])
    if detail["type"] in ("dict_type", "model_type"):
        return "must be a table"
    return detail["msg"].replace("Input should be", "must be")
