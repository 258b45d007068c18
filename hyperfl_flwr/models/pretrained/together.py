"""Let several clients pass a shared, frozen body together, each with adapters of its own.

A small batch costs nearly as much as a large one: the body's weights have to be read. Clients whose networks share a
body therefore gain from one forward and one backward pass for all of them, on their batches one after another. Each
client's training code stays as it is and runs in a thread of its own. At the body, forward or backward, a thread waits
until all others wait there, too, or have ended; then one pass serves them all.

Only one thread runs at any time, in a fixed order, so that results do not depend on the threads' timing.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

T = TypeVar("T")

_HERE = threading.local()


class OnBody(Protocol):
    """A network on a body, see `hyperfl_flwr.models.pretrained.network.PretrainedExtractor`."""

    @property
    def adapters(self) -> nn.ModuleList:
        """The adapters."""

    def body_features(self, images: Tensor, sizes: Sequence[int], values: Sequence[Sequence[Tensor]]) -> Tensor:
        """Return the body's features of the batches of several clients, in one pass."""


def current_member() -> "Member | None":
    """Return the member whose thread this is; None outside of `run_together`."""
    return getattr(_HERE, "member", None)


@dataclass(eq=False)
class _Pass:
    """One forward pass of several members, kept for its backward pass.

    Attributes:
        features: The features of all members [B_1 + ... + B_K, F].
        sizes: Batch sizes B_k.
        leaves: The parameters of the adapters of each member.
        waiting: Positions of the members without a backward pass so far.
    """

    features: Tensor
    sizes: list[int]
    leaves: list[list[Tensor]]
    waiting: set[int]


@dataclass(eq=False)
class _Forward:
    extractor: OnBody
    images: Tensor
    parameters: Sequence[Tensor]
    has_gradient: bool
    autocast: torch.dtype | None


@dataclass(eq=False)
class _Backward:
    origin: _Pass
    position: int
    gradient: Tensor


class Member:
    """One client's thread in `run_together`."""

    def __init__(self, work: Callable[[], Any], num_threads: int) -> None:
        self._work, self._num_threads = work, num_threads
        self._turn, self._parked = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.request: _Forward | _Backward | None = None
        self.answer: Any = None
        self.result: Any = None
        self.ended = False

    def go_on(self) -> None:
        """Let the thread run until it waits at the body or ends; called by `run_together`."""
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._turn.release()
        self._parked.acquire()

    def stop(self) -> None:
        """End a thread that has not ended with an error; called by `run_together`."""
        if self._thread.ident is not None and not self.ended:
            self.answer = RuntimeError("the training of all clients was interrupted")
            self._turn.release()

    def wait(self, request: _Forward | _Backward) -> Any:  # noqa: ANN401 - what the request is answered with
        """Wait for the answer to a request; called by the thread."""
        self.request = request
        self._parked.release()
        self._turn.acquire()
        answer, self.answer = self.answer, None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def features(self, extractor: OnBody, images: Tensor) -> Tensor:
        """Return the features of images, from a pass together with the other members."""
        parameters = list(extractor.adapters.parameters())
        device = images.device.type
        # What holds in this thread alone: the pass is computed in another one.
        has_gradient = torch.is_grad_enabled() and any(value.requires_grad for value in parameters)
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        request = _Forward(extractor, images, parameters, has_gradient, autocast)
        features: Tensor = _Together.apply(self, request, *parameters)
        return features

    def _run(self) -> None:
        _HERE.member = self
        torch.set_num_threads(self._num_threads)  # OpenMP counts the threads of each thread
        try:
            # Backward passes on a GPU would otherwise run in one thread of torch's, in which members cannot wait.
            with torch.autograd.set_multithreading_enabled(False):
                self.result = self._work()
        except BaseException as error:  # noqa: BLE001 - what is no failure of one client is raised by `run_together`
            self.result = error
        finally:
            self.ended, self.request = True, None
            self._parked.release()


class _Together(torch.autograd.Function):
    """Features of images, computed with the other members; the gradients of the adapters, too."""

    @staticmethod
    def forward(ctx: Any, member: Member, request: _Forward, *_adapters: Tensor) -> Tensor:  # noqa: ANN401
        ctx.member = member
        features, ctx.origin, ctx.position = member.wait(request)
        return features  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        return (None, None, *ctx.member.wait(_Backward(ctx.origin, ctx.position, gradient)))


def run_together(works: Sequence[Callable[[], T]]) -> list[T | Exception]:
    """Call functions, each in a thread of its own, that pass the bodies of their networks together.

    Args:
        works: The functions. Their networks share one body. They take no gradients of gradients, no gradients of
            images, and one gradient of each pass.

    Returns:
        For each function its result, or the error that ended it.
    """
    members = [Member(work, torch.get_num_threads()) for work in works]
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
    active = list(members)
    while active:
        for member in active:
            member.go_on()
        active = [member for member in active if not member.ended]
        waiting: dict[tuple[Any, ...], list[Member]] = {}
        for member in active:
            waiting.setdefault(_kind(member.request), []).append(member)
        for (compute, *_), group in waiting.items():
            _serve(compute, group)


def _kind(request: "_Forward | _Backward | None") -> tuple[Any, ...]:
    """Return what serves a request, and what requests that are served together have in common."""
    if isinstance(request, _Forward):
        return _forward, request.has_gradient, request.autocast
    if isinstance(request, _Backward):
        return _backward, request.origin
    raise TypeError(f"a member waits for nothing, got {request!r}")


def _serve(compute: Callable[[list[Any]], list[Any]], members: Sequence[Member]) -> None:
    """Answer the requests of some members together, with the error if there is one."""
    try:
        answers = compute([member.request for member in members])
    except Exception as error:  # noqa: BLE001 - each member reports it
        answers = [error] * len(members)
    for member, answer in zip(members, answers, strict=True):
        member.request, member.answer = None, answer


def _forward(requests: list[_Forward]) -> list[tuple[Tensor, _Pass, int]]:
    # Copies: a client may step before others ask for their gradients of this pass.
    leaves = [
        [value.detach().clone().requires_grad_(each.has_gradient) for value in each.parameters] for each in requests
    ]
    sizes = [len(each.images) for each in requests]
    extractor = requests[0].extractor
    images, autocast = torch.cat([each.images for each in requests]), requests[0].autocast
    with (
        torch.set_grad_enabled(requests[0].has_gradient),
        torch.autocast(images.device.type, dtype=autocast, enabled=autocast is not None),
    ):
        features = extractor.body_features(images, sizes, leaves)
    origin = _Pass(features, sizes, leaves, set(range(len(requests))))
    parts = torch.split(features.detach(), sizes)
    return [(part.clone(), origin, position) for position, part in enumerate(parts)]


def _backward(requests: list[_Backward]) -> list[list[Tensor]]:
    origin = requests[0].origin
    gradient = torch.zeros_like(origin.features)
    parts = torch.split(gradient, origin.sizes)
    for each in requests:
        parts[each.position].copy_(each.gradient)
        origin.waiting.discard(each.position)
    wanted = [leaf for each in requests for leaf in origin.leaves[each.position]]
    found = iter(torch.autograd.grad(origin.features, wanted, gradient, retain_graph=bool(origin.waiting)))
    return [[next(found) for _ in origin.leaves[each.position]] for each in requests]
