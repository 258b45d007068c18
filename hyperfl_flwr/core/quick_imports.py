"""Import large packages without collecting garbage, which takes a fifth of the time that torch takes to import."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quick_imports() -> Iterator[None]:
    """Suspend garbage collection for the imports of a `with` block, and exclude their objects from later collections.

    A module's objects live as long as the process: a collection that visits them frees next to nothing and, in a forked
    process, writes to and so copies all of them.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
