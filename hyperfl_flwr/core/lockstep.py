"""Let several functions run in lockstep, so that what they all wait for is computed for all of them at once.

Each function keeps its own code and runs in a thread of its own. Where it needs something that is cheaper for several
than for one, such as a training step on a GPU, it hands over a `Request` and waits. Once all threads wait or have
ended, the requests of one kind are served together.

Only one thread runs at any time, in a fixed order, so that results do not depend on the threads' timing.
"""

import logging
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol, TypeVar

import torch

T = TypeVar("T")

LOGGER = logging.getLogger(__name__)

_HERE = threading.local()


class Request(Protocol):
    """What a function waits for."""

    @property
    def kind(self) -> Hashable:
        """What requests that are served together have in common."""

    @staticmethod
    def serve(requests: Sequence[Any]) -> Sequence[Any]:
        """Return the answers to requests of one type and kind."""


def current_member() -> "Member | None":
    """Return the member whose thread this is; None outside of `run_in_lockstep`."""
    return getattr(_HERE, "member", None)


class Member:
    """One function's thread in `run_in_lockstep`.

    Args:
        work: The function.
        num_threads: Number of threads of torch's operators.
        stacks_training: Whether local training is a request, see `hyperfl_flwr.training.stacked_sgd`.
    """

    def __init__(self, work: Callable[[], Any], num_threads: int, *, stacks_training: bool) -> None:
        self._work, self._num_threads, self.stacks_training = work, num_threads, stacks_training
        self._turn, self._parked = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.request: Request | None = None
        self.answer: Any = None
        self.result: Any = None
        self.ended = False

    def go_on(self) -> None:
        """Let the thread run until it waits or ends; called by `run_in_lockstep`."""
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._turn.release()
        self._parked.acquire()

    def stop(self) -> None:
        """End a thread that has not ended with an error; called by `run_in_lockstep`."""
        if self._thread.ident is not None and not self.ended:
            self.answer = RuntimeError("the training of all clients was interrupted")
            self._turn.release()

    def wait(self, request: Request) -> Any:  # noqa: ANN401 - what the request is answered with
        """Wait for the answer to a request; called by the thread. Raises the error that serving it has raised."""
        self.request = request
        self._parked.release()
        self._turn.acquire()
        answer, self.answer = self.answer, None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _run(self) -> None:
        _HERE.member = self
        torch.set_num_threads(self._num_threads)  # OpenMP counts the threads of each thread
        try:
            # Backward passes on a GPU would otherwise run in one thread of torch's, in which members cannot wait.
            with torch.autograd.set_multithreading_enabled(False):
                self.result = self._work()
        except BaseException as error:  # noqa: BLE001 - what is no failure of one client is raised by `run_in_lockstep`
            self.result = error
        finally:
            self.ended, self.request = True, None
            self._parked.release()


def run_in_lockstep(works: Sequence[Callable[[], T]], *, stacks_training: bool = False) -> list[T | Exception]:
    """Call functions, each in a thread of its own, and serve their requests together.

    Args:
        works: The functions.
        stacks_training: Whether local training is a request, see `hyperfl_flwr.training.stacked_sgd`.

    Returns:
        For each function its result, or the error that ended it.
    """
    members = [Member(work, torch.get_num_threads(), stacks_training=stacks_training) for work in works]
    try:
        _run(members)
    finally:  # after an interruption no thread may wait forever
        for member in members:
            member.stop()
    for member in members:
        if isinstance(member.result, BaseException) and not isinstance(member.result, Exception):
            raise member.result
    return [member.result for member in members]


def _run(members: Sequence[Member]) -> None:
    active, has_warned = list(members), False
    while active:
        for member in active:
            member.go_on()
        active = [member for member in active if not member.ended]
        waiting: dict[tuple[type, Hashable], list[Member]] = {}
        for member in active:
            if member.request is None:
                raise TypeError("a member waits for nothing")
            waiting.setdefault((type(member.request), member.request.kind), []).append(member)
        for group in waiting.values():
            error = _serve(group)
            if error and len(group) > 1 and not has_warned:
                LOGGER.warning("%d clients are processed one by one, since together they failed: %s", len(group), error)
                has_warned = True


def _serve(members: Sequence[Member]) -> Exception | None:
    """Answer the requests of some members together; after an error each alone, so that others than its cause go on.

    Returns:
        The error of all together; None if there was none.
    """
    requests: list[Any] = [member.request for member in members]
    failed = None
    try:
        answers = type(requests[0]).serve(requests)
    except Exception as error:  # noqa: BLE001 - each member reports it
        failed = error
        answers = [error] if len(members) == 1 else [_answer_alone(request, error) for request in requests]
    for member, answer in zip(members, answers, strict=True):
        member.request, member.answer = None, answer
    return failed


def _answer_alone(request: Request, error: Exception) -> Any:  # noqa: ANN401 - what the request is answered with
    """Return the answer to one of several requests that could not be served together, or the error of these."""
    try:
        return type(request).serve([request])[0]
    except Exception:  # noqa: BLE001 - may be a consequence of the first one, such as a graph that is partly freed
        return error
