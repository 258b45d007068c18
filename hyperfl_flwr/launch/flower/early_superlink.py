"""Start a simulation's SuperLink while the run's settings are checked: each takes two seconds, on a core of its own."""

import threading
from types import TracebackType
from typing import Self

from hyperfl_flwr.launch.flower.local_superlink import LocalSuperLink


class EarlySuperLink:
    """Start a SuperLink in the background for the duration of a `with` block.

    No run is submitted before the caller has checked its settings and calls `get`. If that does not happen, leaving the
    block ends the SuperLink at once.

    Args:
        wanted: Whether a SuperLink will be needed; if not, none is started before `get`.
    """

    def __init__(self, *, wanted: bool = True) -> None:
        self._wanted = wanted
        self._thread: threading.Thread | None = None
        self._superlink: LocalSuperLink | None = None
        self._problem: BaseException | None = None

    def __enter__(self) -> Self:
        if self._wanted:
            self._begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.discard()

    def get(self) -> LocalSuperLink:
        """Wait until the SuperLink answers, and return it; start one if there is none.

        Raises:
            HyperFLError: If it could not start.
        """
        if self._thread is None:
            self._begin()
        if self._thread is not None:
            self._thread.join()
        if self._problem is not None:
            raise self._problem
        if self._superlink is None:
            raise ValueError("the SuperLink was discarded while it started")
        return self._superlink

    def discard(self) -> None:
        """End the SuperLink, if there is one; `get` would start another one."""
        if self._superlink is not None:
            self._superlink.give_up()
        if self._thread is not None:
            self._thread.join()
        if self._superlink is not None:
            self._superlink.stop()
        self._thread = self._superlink = self._problem = None

    def _begin(self) -> None:
        self._superlink = superlink = LocalSuperLink()

        def start() -> None:
            try:
                superlink.__enter__()
            except BaseException as problem:  # noqa: BLE001 - `get` raises it in the caller's thread
                self._problem = problem

        self._thread = threading.Thread(target=start, name="superlink-start", daemon=True)
        self._thread.start()
