"""Registry of the methods: each module declares one method and its settings; nothing here imports torch."""

import importlib
import pkgutil
from collections.abc import Mapping, Sequence

from hyperfl_flwr.core.method import Method
from hyperfl_flwr.core.settings import Section


def _rows() -> Mapping[str, Method]:
    """Return the `METHOD` of every module in this folder, by method name, in the order of the file names."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    rows: Sequence[Method] = [importlib.import_module(f"{__name__}.{name}").METHOD for name in names]
    return {row.name: row for row in rows}


METHODS = _rows()
"""All methods by name."""


def method_sections() -> Sequence[type[Section]]:
    """Return the settings sections of all methods, each once (methods may share a section)."""
    return list(dict.fromkeys(section for method in METHODS.values() for section in method.settings))
