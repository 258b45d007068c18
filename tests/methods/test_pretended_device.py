"""Federations whose clients train on a pretended device: no operator mixes devices, and a step waits for no transfer.

A run with two local epochs minus a run with one gives the transfers of a pass over the data, of four steps.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federations import of_every_method_if_extended
from pretended_device import DEVICE, MixedDevicesError, PretendedDevice

import hyperfl_flwr.app.node
import hyperfl_flwr.launch.planning
from hyperfl_flwr.contract.base import SMALL, Federate
from hyperfl_flwr.contract.folders import metrics
from hyperfl_flwr.core.device import send
from hyperfl_flwr.core.lockstep import Member
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.data.augmentation import Augmentation
from hyperfl_flwr.data.federated_data import ClientData
from hyperfl_flwr.launch.planning import plan
from hyperfl_flwr.launch.plans import RAY
from hyperfl_flwr.metrics.evaluation import evaluate
from hyperfl_flwr.models.layers.dropout import Dropout, seed_dropout
from hyperfl_flwr.training import hyperfl_cohort, stacked_sgd
from hyperfl_flwr.training.local_sgd import batches

CLIENTS, ROUNDS, STEPS = 2, 2, 4
FEW, MANY = 1, 2
"""Numbers of local epochs that are compared."""

TRANSFERS: Mapping[str, tuple[float, float]] = {
    "ditto": (2, 2),  # two models, one after the other
    "fedgen": (1, 1 + 3 * STEPS / ROUNDS),  # from round 2 on, each step draws labels and two noises
    "priv-hfl": (0, 1 + STEPS),  # one loss for all steps; each step draws a batch of the pseudo-data
}
"""Most reads by the host and most copies to the device in a pass; other methods read the pass's loss, and send its
order."""

ALONE = frozenset({"apfl", "fedbn", "fedrod", "per-fedavg", "pfedme", "ppsgd", "priv-hfl"})
"""Methods whose clients are not stacked: they have steps of their own, or, fedbn, batch statistics."""

Train = Callable[..., tuple[list[dict[str, Any]], PretendedDevice]]


RUN = Member._run


def in_thread(device: PretendedDevice) -> Callable[[Member], None]:
    """Return `Member._run` with the device active in the member's thread."""

    def run(member: Member) -> None:
        with device.elsewhere():
            RUN(member)

    return run


@pytest.fixture
def stacked_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the numbers of clients that were stacked; an error of such a training fails the federation.

    Otherwise each client would train alone after it.
    """
    found: list[int] = []

    def served(train: Callable[[Sequence[Any]], list[float]], requests: Sequence[Any]) -> list[float]:
        found.append(len(requests))
        return train(requests)

    for module in (hyperfl_cohort, stacked_sgd):
        monkeypatch.setattr(module, "served", served)
    return found


@pytest.fixture
def train(federate: Federate, monkeypatch: pytest.MonkeyPatch, stacked_sizes: list[int]) -> Train:
    """Return a function that runs a federation on the device, and returns its metrics and the device."""
    monkeypatch.setattr(hyperfl_flwr.app.node, "resolve_device", lambda _: DEVICE)

    def run(method: str, **changes: Scalar) -> tuple[list[dict[str, Any]], PretendedDevice]:
        with PretendedDevice() as device:
            monkeypatch.setattr(Member, "_run", in_thread(device))
            return metrics(federate(method, 1, num_clients=CLIENTS, **changes)), device

    return run


def losses(rows: list[dict[str, Any]], last: int = ROUNDS) -> list[float]:
    return [row["train_loss"] for row in rows if "train_loss" in row and row["round"] <= last]


def per_pass(few: PretendedDevice, many: PretendedDevice) -> tuple[float, float]:
    """Return the numbers of reads and copies in one pass of one client."""
    number = (MANY - FEW) * CLIENTS * ROUNDS
    reads, sent = len(many.reads()) - len(few.reads()), len(many.sent()) - len(few.sent())
    return reads / number, sent / number


def of_length(epochs: int) -> dict[str, Scalar]:
    size = int(SMALL["data.train-samples"])
    return {"local_epochs": epochs, "batch_size": size // STEPS, "priv-hfl.local-steps": STEPS * epochs}


@of_every_method_if_extended
def test_a_method_has_the_losses_of_the_cpu_and_few_transfers(
    method: str, federate: Federate, train: Train, stacked_sizes: list[int]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hyperfl_flwr.app.node, "resolve_device", torch.device)
        on_cpu = losses(metrics(federate(method, 1, num_clients=CLIENTS, **of_length(FEW))))
    (rows, few), (_, many) = (train(method, **of_length(epochs)) for epochs in (FEW, MANY))
    compared = 1 if method == "srr-fl" else ROUNDS  # no two uploads of srr-fl are equal
    found = losses(rows, compared)
    assert found
    assert found == pytest.approx(on_cpu[: len(found)], rel=1e-4)
    found_per_pass, most = per_pass(few, many), TRANSFERS.get(method, (1, 1))
    assert all(np.less_equal(found_per_pass, most)), f"{found_per_pass} reads and copies per pass, at most {most}"
    assert bool(stacked_sizes) == (method not in ALONE)
    assert set(stacked_sizes) <= {CLIENTS}


def test_a_noisy_step_sends_its_batch_and_its_noise_and_checks_three_layers(train: Train) -> None:
    """Batch and noise come from the operating system's random numbers; each layer's norms are checked three times."""
    few, many = (train("fedavg", **of_length(epochs), **{"dp.epsilon": 8.0})[1] for epochs in (FEW, MANY))
    reads, sent = per_pass(few, many)
    assert reads <= 1 + 3 * 3 * STEPS
    assert sent <= 2 * STEPS


@pytest.mark.parametrize(
    ("target", "method"),
    [
        ("cnn", "hyperfl"), ("lenet", "pfedhn"), ("mlp", "hyperfl"), ("mlp-500", "it-pfl"), ("resnet18", "fedavg"),
        ("own_networks:build", "fedavg"), ("own_networks:with_batchnorm", "fedrep"),
        ("own_networks:attention", "local"), ("own_networks:recurrent", "fedavg"),
    ],
)  # fmt: skip
def test_a_target_mixes_no_devices(target: str, method: str, train: Train, tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (40, 16, 16, 3), dtype=np.uint8)
    np.savez(tmp_path / "noise.npz", images=pixels, labels=np.arange(40) % 2)
    sizes: dict[str, Scalar] = {"data.train-samples": 10, "data.test-samples": 4, "data.partition": "iid"}
    rows, device = train(
        method, target=target, dataset=f"npz:{tmp_path / 'noise.npz'}", num_rounds=1, batch_size=5, **sizes
    )
    assert np.isfinite(losses(rows)).all()
    assert losses(rows)
    assert device.sent()


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("it-pfl", {"it-pfl.pooling": "mean", "novel.epsilons": "none,1e9", "novel.samples": "all,8"}),
        ("fedavg", {"novel.corruptions": "none,rotation"}),
    ],
)
def test_novel_clients_mix_no_devices(method: str, changes: dict[str, Scalar], train: Train) -> None:
    rows, _ = train(
        method, target="mlp", num_rounds=2, **{"novel.clients": 2, "novel.a-distance-rounds": 2, **changes},
        **{"data.partition": "iid"},
    )  # fmt: skip
    assert losses(rows)


def test_a_run_is_planned_without_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that are built to count what they share stay on the CPU, since the nodes need the device's memory."""
    monkeypatch.setattr(hyperfl_flwr.launch.planning, "resolve_device", lambda _: DEVICE)
    with PretendedDevice() as device:
        planned = plan({"output": str(tmp_path / "run"), "data.train-samples": 10, "data.test-samples": 10}, None, RAY)
    assert planned.device == DEVICE.type
    assert device.transfers == []


def samples(size: int, augmentation: Augmentation | None) -> ClientData:
    images = torch.randn(size, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(size) % 10
    return ClientData(
        train_images=images, train_labels=labels, test_images=images, test_labels=labels, augmentation=augmentation,
        num_classes=10,
    )  # fmt: skip


def test_an_augmented_pass_is_that_of_the_cpu_and_sends_two_small_arrays() -> None:
    """The order, 8 bytes for each sample, and three numbers of 8 bytes: no positions of pixels."""
    data = samples(40, Augmentation(pad_value=(-1.0, 0.0, 1.0)))
    on_cpu = [images for images, _ in batches(data, 16, np.random.default_rng(0))]
    with PretendedDevice() as device:
        there = data.to(DEVICE)
        device.transfers.clear()
        found = list(batches(there, 16, np.random.default_rng(0)))
        assert [transfer.num_bytes for transfer in device.transfers] == [40 * 8, 40 * 3 * 8]
        for (images, _), expected in zip(found, on_cpu, strict=True):
            assert torch.equal(images.cpu(), expected)


@pytest.mark.parametrize("batch_size", [200, 7])
def test_an_evaluation_is_read_once(batch_size: int) -> None:
    data, weights = samples(100, None), torch.randn(3 * 64, 10, generator=torch.Generator().manual_seed(1))
    expected = evaluate(lambda images: images.flatten(1) @ weights, data.test_images, data.test_labels)
    with PretendedDevice() as device:
        there, moved = data.to(DEVICE), send(weights, DEVICE)
        device.transfers.clear()
        found = evaluate(
            lambda images: images.flatten(1) @ moved, there.test_images, there.test_labels, batch_size=batch_size
        )
        numbers = 1 + 100 * (2 + 10)  # the loss, and of each sample its class, the predicted one, and the softmax
        assert [(transfer.to_host, transfer.num_bytes) for transfer in device.transfers] == [(True, 8 * numbers)]
    assert (found.correct, found.total) == (expected.correct, expected.total)
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)


REFUSED: dict[str, Callable[[torch.Tensor], object]] = {
    "a tensor of the CPU": lambda there: there + torch.ones(4),
    "a tensor of the CPU in a list": lambda there: torch.cat([there, torch.ones(1)]),
    "a tensor of the CPU, changed in place": lambda there: torch.ones(4).add_(there),
    "a scalar of the CPU, changed in place": lambda there: torch.ones(()).add_(there[0]),
    "positions on the device of a tensor on the CPU": lambda there: torch.ones(4)[there.long()],
    "a scalar of the CPU in a matrix": lambda there: torch.stack([there[0], torch.ones(())]),
    "random numbers of the device": lambda there: there.normal_(),
    "random numbers of the CPU on the device": lambda _: torch.rand(4, device=DEVICE, generator=torch.Generator()),
    "a copy without values": lambda there: torch.zeros_like(there, device="meta"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_device_refuses_what_cuda_refuses(name: str) -> None:
    with PretendedDevice(), pytest.raises(MixedDevicesError):
        REFUSED[name](torch.zeros(4, device=DEVICE))


def test_the_device_allows_what_cuda_allows() -> None:
    with PretendedDevice() as device:
        there = torch.tensor([1.0, 2.0, 3.0, 4.0], device=DEVICE)
        assert (there + torch.ones(())).tolist() == [2, 3, 4, 5]
        assert there[torch.tensor([3])].cpu().tolist() == [4]
        assert torch.zeros(4).copy_(there).tolist() == [1, 2, 3, 4]
    sizes = [(transfer.to_host, transfer.num_bytes) for transfer in device.transfers]
    assert sizes == [(False, 16), (True, 16), (False, 8), (True, 4), (True, 16)]


def test_the_device_counts_what_the_host_waits_for() -> None:
    waits: list[Callable[[torch.Tensor], object]] = [
        float, torch.nonzero, lambda there: there[there > 0], lambda there: bool((there > 0).any()), torch.Tensor.cpu,
    ]  # fmt: skip
    for wait in waits:
        with PretendedDevice() as device:
            there = torch.ones(1, device=DEVICE)
            device.transfers.clear()
            wait(there)
        assert [transfer.to_host for transfer in device.transfers] == [True]


def test_dropout_sends_a_byte_for_each_unit() -> None:
    layer = Dropout(0.5)
    seed_dropout([layer], torch.Generator().manual_seed(0))
    on_cpu = layer(torch.ones(6, 5))
    with PretendedDevice() as device:
        there = torch.ones(6, 5, device=DEVICE)
        seed_dropout([layer], torch.Generator().manual_seed(0))
        assert torch.equal(layer(there).cpu(), on_cpu)
        assert [transfer.num_bytes for transfer in device.sent()] == [30]
