"""Import large packages without collecting garbage, which takes a fifth of the time that torch takes to import."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quick_imports() -> Iterator[None]:
    """Suspend garbage collection for the imports of a `with` block: what modules define is hardly ever garbage."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
