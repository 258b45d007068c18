"""Registry of the methods: each module declares one method and its settings; nothing here imports torch.

A method of the user's own has the name `package.module:METHOD`, and is imported when it is looked up, see
`hyperfl_flwr.core.packages.user_code`.
"""

import importlib
import math
import pkgutil
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import get_args

from hyperfl_flwr.core.method import Form, Method, Part, Upload
from hyperfl_flwr.core.packages.user_code import UserCode, is_user_code
from hyperfl_flwr.core.settings import Section, declared
from hyperfl_flwr.core.similar_names import nearest

_KEY = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
"""Pattern of the key of a section of settings."""


class Methods(Mapping[str, Method]):
    """The methods by name: iterates over the built-in ones, and looks up those of the user's own, too.

    Attributes:
        built_in: The `METHOD` of every module in this folder, by method name, in the order of the file names.
    """

    def __init__(self) -> None:
        names = sorted(module.name for module in pkgutil.iter_modules(__path__))
        rows: Sequence[Method] = [importlib.import_module(f"{__name__}.{name}").METHOD for name in names]
        self.built_in = {row.name: row for row in rows}

    def __getitem__(self, name: str) -> Method:
        """Return a method.

        Raises:
            KeyError: If there is no built-in method of this name, and it does not name one of the user's own.
            ConfigError: If a method of the user's own cannot be imported, or its declaration is wrong.
        """
        return _own(name) if is_user_code(name) else self.built_in[name]

    def __contains__(self, name: object) -> bool:
        """Return whether a name is that of a built-in method, or has the form of one of the user's own."""
        return isinstance(name, str) and (name in self.built_in or is_user_code(name))

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of the built-in methods."""
        return iter(self.built_in)

    def __len__(self) -> int:
        """Return the number of built-in methods."""
        return len(self.built_in)


METHODS = Methods()
"""All methods by name."""


def method_sections(method: str = "") -> Sequence[type[Section]]:
    """Return the settings sections of all built-in methods, each once (methods may share a section).

    Args:
        method: Name of a method of the user's own, whose sections follow; names of built-in methods have no effect.
    """
    found = [section for row in METHODS.values() for section in row.settings]
    own = METHODS[method].settings if is_user_code(method) else ()
    return list(dict.fromkeys([*found, *own]))


def _own(name: str) -> Method:
    """Import and check the declaration of a method of the user's own."""
    code = UserCode("method", name)
    found = code.load()
    attribute = name.partition(":")[2]
    if not isinstance(found, Method):
        raise code.problem(
            f"{attribute} must be a hyperfl_flwr.core.method.Method, got {type(found).__name__}; assign one to it"
        )
    for field, (fits, wanted) in _FIELDS.items():
        if not fits(getattr(found, field)):
            raise code.problem(f"{field} must be {wanted}, got {getattr(found, field)!r}; correct it in {attribute}")
    for upload in found.uploads:
        _check_upload(code, upload)
    for section in found.settings:
        _check_section(code, section)
    if twice := [key for key, count in Counter(section.key for section in found.settings).items() if count > 1]:
        raise code.problem(f"two of its sections have the key {twice[0]}; give each another key")
    return found


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_rate(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _are(kind: type) -> Callable[[object], bool]:
    return lambda value: isinstance(value, tuple) and all(isinstance(each, kind) for each in value)


def _are_sections(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(each, type) and issubclass(each, Section) for each in value)


_FIELDS: Mapping[str, tuple[Callable[[object], bool], str]] = {
    **dict.fromkeys(("name", "title", "paper", "sends", "keeps", "client", "strategy"), (_is_text, "a text")),
    "uploads": (_are(Upload), "a tuple of Upload"),
    "learning_rate": (_is_rate, "a number above 0"),
    "settings": (_are_sections, "a tuple of subclasses of hyperfl_flwr.core.settings.Section"),
    "targets": (callable, "a function of the settings"),
    "private_classifier": (lambda value: isinstance(value, bool), "a truth value"),
    "weight_epsilon": (lambda value: value is None or callable(value), "None or a function of the settings"),
}
"""What the fields of a declaration must be: field -> (test, description)."""


def _check_upload(code: UserCode, upload: Upload) -> None:
    """Refuse an upload that no attack can match on."""
    for field, known in (("part", get_args(Part)), ("form", get_args(Form))):
        if (given := getattr(upload, field)) not in known:
            meant = nearest(given, known) if isinstance(given, str) else ""
            raise code.problem(f"{field} of an Upload must be one of {', '.join(known)}, got {given!r}{meant}")


def _check_section(code: UserCode, section: type[Section]) -> None:
    """Refuse a section whose settings could be mistaken for others, or cannot be passed on by Flower."""
    built_in = {kind.key: kind for row in METHODS.built_in.values() for kind in row.settings}
    if built_in.get(section.key) is section:
        return
    if not isinstance(section.key, str) or not _KEY.fullmatch(section.key):
        raise code.problem(
            f"the key of {section.__name__} must be lower-case letters, digits and hyphens, as my-method; got "
            f"{section.key!r}"
        )
    if section.key in built_in:
        raise code.problem(
            f"the key {section.key} of {section.__name__} is that of a built-in method's settings; choose another key, "
            f"or use {built_in[section.key].__name__} itself"
        )
    settings = list(declared(section))
    named = {each.key.partition(".")[2].replace("-", "_") for each in settings}
    if undeclared := sorted(set(section.model_fields) - named):
        raise code.problem(f"{section.__name__} declares {', '.join(undeclared)} without `setting(default, meaning)`")
    for each in settings:
        if not _KEY.fullmatch(each.key.partition(".")[2]):
            raise code.problem(f"the name of {each.key} must be ASCII letters, digits and underscores; rename it")
        if not _can_travel(each.default):
            raise code.problem(
                f"the default of {each.key} must be a finite number, a text or a truth value, got {each.default!r}"
            )


def _can_travel(value: object) -> bool:
    """Return whether a value can be one of a TOML file, and equals itself after that."""
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, bool | str) or (isinstance(value, int) and abs(value) < 2**63)
