"""Declare groups of settings as pydantic classes with a type, a default and a description for each field.

Names, defaults and descriptions are defined only in these classes. `scripts/generate_settings.py` generates the table
of defaults in pyproject.toml, which Flower reads, and docs/reference/settings.md from them.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from hyperfl_flwr.core.setting_types import Scalar

T = TypeVar("T")

Auto = Literal["auto"]
Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
ShareBelowOne = Annotated[float, Field(ge=0, lt=1)]
Probability = Annotated[float, Field(gt=0, lt=1)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]


def _device(value: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", value):
        raise ValueError(f"must be auto, cpu, cuda or cuda:NUMBER, others (mps) are not tested; got {value!r}")
    return value


Device = Annotated[str, AfterValidator(_device)]


def absolute(value: str) -> str:
    """Check that a path is absolute, or empty."""
    if value and not Path(value).is_absolute():
        raise ValueError(f"must be an absolute path, since the app runs in a separate folder; got {value!r}")
    return value


AbsolutePath = Annotated[str, AfterValidator(absolute)]


def setting(
    default: T, meaning: str, *, values: str = "", resumable: bool = False, resolved_by_method: bool = False
) -> T:
    """Declare a field of a section.

    For example `rounds: Positive = setting(10, "Number of rounds.")`.

    Args:
        default: Default value.
        meaning: Description of its effect in sentences; paragraphs are separated by an empty line.
        values: Description of the allowed values; empty if the type describes them.
        resumable: Whether a resumed run may change it; all other settings affect the training.
        resolved_by_method: Whether its `auto` is replaced by a value of the method; always true in a method's section.
    """
    extra = {"values": values, "resumable": resumable, "resolved_by_method": resolved_by_method}
    return Field(default=default, description=meaning, json_schema_extra=cast(Any, extra))


def _kebab(name: str) -> str:
    return name.replace("_", "-")


class Section(BaseModel):
    """Base class of a group of settings: names with hyphens, strict types, unknown names refused.

    Attributes:
        key: Prefix of the settings' keys before the dot, for example `data`; empty for settings without a dot.
        title: Heading of the group in the documentation.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", alias_generator=_kebab)

    key: ClassVar[str] = ""
    title: ClassVar[str] = ""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Description of a setting for the documentation and the command line.

    Attributes:
        key: Complete key, for example `data.partition`.
        default: Default value.
        values: Description of the allowed values; literal values are in backticks.
        meaning: Description of its effect.
        resumable: Whether a resumed run may change it.
        is_auto: Whether it may be `auto`.
        resolved_by_method: Whether its `auto` is replaced by a value of the method.
    """

    key: str
    default: Scalar
    values: str
    meaning: str
    resumable: bool
    is_auto: bool
    resolved_by_method: bool


@cache
def declared(section: type[Section]) -> Sequence[Setting]:
    """Return the settings of a section, in the order of the class; sections inside it are left out."""
    return tuple(_declared(section))


def _declared(section: type[Section]) -> Iterator[Setting]:
    prefix = f"{section.key}." if section.key else ""
    for name, field in section.model_fields.items():
        extra = cast(dict[str, Any], field.json_schema_extra or {})
        if "resumable" in extra:  # declared by `setting`
            words = list(_words(field.annotation, field.metadata))
            yield Setting(
                key=prefix + _kebab(name),
                default=cast(Scalar, field.default),
                values=extra["values"] or " or ".join(words),
                meaning=field.description or "",
                resumable=extra["resumable"],
                is_auto="`auto`" in words,
                resolved_by_method=extra["resolved_by_method"],
            )


def _words(kind: Any, constraints: Sequence[Any]) -> Iterator[str]:  # noqa: ANN401 - any type
    """Yield a description of the allowed values for each alternative of a type."""
    if get_origin(kind) is Literal:
        yield ", ".join(f"`{value}`" for value in get_args(kind))
    elif get_origin(kind) is Annotated:
        base, *more = get_args(kind)
        yield from _words(base, [one for constraint in more for one in getattr(constraint, "metadata", [constraint])])
    elif alternatives := get_args(kind):
        for alternative in alternatives:
            yield from _words(alternative, ())
    elif kind is bool:
        yield "`true`, `false`"
    elif kind in (int, float):
        bounds = _bounds(constraints)
        if kind is int and "gt" in bounds:
            bounds = {"ge": bounds.pop("gt") + 1} | bounds
        yield f"{'whole number' if kind is int else 'number'} {_range(bounds)}".strip()


def _bounds(constraints: Sequence[Any]) -> dict[str, float]:
    names = ("gt", "ge", "lt", "le")
    return {
        name: getattr(constraint, name) for constraint in constraints for name in names if hasattr(constraint, name)
    }


def _range(bounds: Mapping[str, float]) -> str:
    """Return bounds as `≥ 1`, `> 0` or an interval as `[0, 1)`."""
    low = f"({bounds['gt']}" if "gt" in bounds else f"[{bounds['ge']}" if "ge" in bounds else ""
    high = f"{bounds['lt']})" if "lt" in bounds else f"{bounds['le']}]" if "le" in bounds else ""
    if low and high:
        return f"in {low}, {high}"
    return low.replace("(", "> ").replace("[", "≥ ")
