"""Clients that pass a shared body together have the results that they have alone."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from pretrained_bodies import CIFAR, built
from torch import nn

from hyperfl_flwr.core.lockstep import run_in_lockstep
from hyperfl_flwr.models.lowered import in_bfloat16
from hyperfl_flwr.models.pretrained.network import PretrainedExtractor, PretrainedTarget

pytestmark = pytest.mark.usefixtures("resnet18_chosen")


def training(target: PretrainedTarget, seed: int, steps: int, sizes: tuple[int, ...] = (4,)) -> Callable[[], float]:
    """Return SGD of a number of steps with batches of the given sizes, with a pass without gradients before each."""
    generator = torch.Generator().manual_seed(seed)

    def work() -> float:
        optimiser = torch.optim.SGD(target.parameters(), lr=0.05)
        loss = torch.zeros(())
        for step in range(steps):
            size = sizes[step % len(sizes)]
            images = torch.randn(size, *CIFAR, generator=generator)
            with torch.no_grad():
                target.extractor(images)
            if step == FAILS_AT and seed == FAILING:
                raise FloatingPointError("this client fails")
            loss = nn.functional.cross_entropy(target(images), torch.arange(size))
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        return loss.item()

    return work


FAILS_AT, FAILING = 1, 7
"""Step at which the client with this seed fails."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_clients_that_pass_the_body_together(dtype: torch.dtype) -> None:
    """Clients with other numbers and sizes of batches, of which one fails, have the results that they have alone."""
    works = {1: (3, (4,)), 2: (1, (2,)), FAILING: (3, (4,)), 4: (4, (5, 1))}
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        together, alone = ([built("lpm-resnet18").to(dtype) for _ in works] for _ in range(2))
        results = run_in_lockstep(
            [training(each, seed, *works[seed]) for each, seed in zip(together, works, strict=True)]
        )
        for target, other, seed, result in zip(together, alone, works, results, strict=True):
            if seed == FAILING:
                assert isinstance(result, FloatingPointError)
                continue
            assert result == pytest.approx(training(other, seed, *works[seed])(), rel=1e-5)
            for value, expected in zip(target.parameters(), other.parameters(), strict=True):
                tolerance = 1e-12 if dtype == torch.float64 else 1e-5
                torch.testing.assert_close(value, expected, rtol=tolerance, atol=tolerance)
    finally:
        torch.set_default_dtype(default)


def test_precision_reaches_the_shared_pass() -> None:
    """With bfloat16, clients have the same results together and alone, and others than with float32."""
    images = torch.randn(4, *CIFAR)
    target, plain = in_bfloat16(built("lpm-resnet18")), built("lpm-resnet18")
    (together,) = run_in_lockstep([lambda: target.extractor(images).detach()])
    assert isinstance(together, torch.Tensor)
    assert torch.equal(together, target.extractor(images))
    assert not torch.equal(together, plain.extractor(images))


def test_no_graph_is_kept_for_a_pass_without_gradients() -> None:
    target = built("lpm-resnet18")

    def work() -> bool:
        with torch.no_grad():
            return bool(target.extractor(torch.randn(2, *CIFAR)).requires_grad)

    assert run_in_lockstep([work, work]) == [False, False]


def test_a_client_may_step_before_others_ask_for_their_gradients() -> None:
    """One client is a forward pass ahead of the other, so that their backward passes come at different times."""
    results = []
    for run in (run_in_lockstep, lambda works: [work() for work in works]):
        targets = [built("lpm-resnet18") for _ in range(2)]
        results.append(run([ahead(target, number) for number, target in enumerate(targets)]))
    assert results[0] == pytest.approx(results[1], rel=1e-5)


def ahead(target: PretrainedTarget, passes: int) -> Callable[[], float]:
    """Return two steps, with further forward passes between the forward and the backward pass of the first."""
    images = torch.randn(3, *CIFAR, generator=torch.Generator().manual_seed(5))

    def work() -> float:
        optimiser = torch.optim.SGD(target.parameters(), lr=0.05)
        for _ in range(2):
            loss = target(images).square().mean()
            for _ in range(passes):
                target(images)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        return float(target(images).square().mean().detach())

    return work


@pytest.mark.parametrize("limit", ["memory", "images"])
def test_an_error_of_the_shared_pass_is_that_of_its_cause(
    limit: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Too many batches for the memory pass one by one; a client with bad images fails alone.

    One warning says so.
    """
    body_features, sizes_of = PretrainedExtractor.body_features, {2: 4, 3: 3, 4: 4}

    def limited(extractor: PretrainedExtractor, images: torch.Tensor, sizes: Sequence[int], values: Any) -> Any:
        if (limit == "memory" and len(sizes) > 1) or (limit == "images" and 3 in sizes):
            raise RuntimeError("no room for it")
        passed.append(len(sizes))
        return body_features(extractor, images, sizes, values)

    expected = [training(built("lpm-resnet18"), seed, 2, (size,))() for seed, size in sizes_of.items()]
    passed: list[int] = []
    monkeypatch.setattr(PretrainedExtractor, "body_features", limited)
    results = run_in_lockstep([training(built("lpm-resnet18"), seed, 2, (size,)) for seed, size in sizes_of.items()])
    assert [record.message for record in caplog.records if "one by one" in record.message] == [
        "3 clients are processed one by one, since together they failed: no room for it"
    ]
    if limit == "memory":
        assert results == pytest.approx(expected, rel=1e-5)
        assert set(passed) == {1}
    else:
        assert str(results.pop(1)) == "no room for it"
        assert results == pytest.approx([expected[0], expected[2]], rel=1e-5)
        assert set(passed) == {1, 2}


def test_threads_end_after_an_interruption(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interruption during a shared pass leaves no waiting thread behind."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = threading.active_count()
    target = built("lpm-resnet18")
    monkeypatch.setattr(PretrainedExtractor, "body_features", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_in_lockstep([training(target, 1, 1), training(target, 2, 1)])
    for thread in [thread for thread in threading.enumerate() if thread is not threading.current_thread()]:
        thread.join(5)
    assert threading.active_count() <= before
