"""What all attacks share: their settings, their result, and the batching of clients into independent problems."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hyperfl_flwr.attacks.knowledge import PublicKnowledge
from hyperfl_flwr.attacks.optimiser_loop import IMAGES, Optimisation, Problems, Progress, Tensors, solve
from hyperfl_flwr.core.rng import torch_generator
from hyperfl_flwr.models.layers.batchnorm import UNCOUNTED
from hyperfl_flwr.models.target import Target
from hyperfl_flwr.models.targets import ChannelsLast, build_target
from hyperfl_flwr.runs.observation import Observation

IntArray = NDArray[np.int64]

FloatArray = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class AttackSettings:
    """How an attack is run; what it knows is not among them but for labels and activations.

    Attributes:
        labels: The labels [n] of each client, where the setting lets the server know them.
        hidden: HyperFL's activation z [p] of each client, where single uploads gave them away before a sum.
        optimisation: None for the attack's own.
        seed: Of the random starts.
        device: Where the optimisation runs.
        at_once: Largest number of clients whose problems run as one batch; it bounds the memory.
        progress: Called with steps done and their total, over all clients.
    """

    labels: Sequence[IntArray] | None = None
    hidden: Sequence[Tensor] | None = None
    optimisation: Optimisation | None = None
    seed: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    at_once: int = 32
    progress: Progress | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Reconstruction:
    """What an attack found out about one client.

    Attributes:
        images: float32 [m, C, H, W], pixels in [0, 1], in no particular order; m = 0 where an attack finds none.
        labels: int64 [n], found or known; None where the attack needs none.
        objective: What is left of the objective; 0 is a perfect match of the reply.
        iterations: Steps taken.
        seconds: Wall time of the batch divided by its clients.
        findings: Numbers about the reading of the reply.
        label_counts: Estimated number of private samples of each class, float64 [K]; None where none are estimated.
    """

    images: FloatArray
    labels: IntArray | None = None
    label_counts: NDArray[np.float64] | None = None
    objective: float = float("nan")
    iterations: int = 0
    seconds: float = 0.0
    findings: Mapping[str, float] = field(default_factory=dict)


AttackFunction = Callable[[Sequence[Observation], PublicKnowledge, AttackSettings], list[Reconstruction]]
"""An attack: observations of one method, the same knowledge for all, one result each.

Of a sum there is one observation, and there may be a result for each client that was found in it, in any order."""


class Counted(Protocol):
    """What is attacked: an observation, or what was read off one."""

    @property
    def num_examples(self) -> int:
        """Number of training samples behind it."""


Client = TypeVar("Client", bound=Counted)

Network = TypeVar("Network", bound=nn.Module)


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Clients with equally many samples, prepared for `inversion.solve`.

    Attributes:
        problems: Their problems, on the settings' device.
        labels: int64 [n] per client, or None.
        findings: Per client.
        other_unknowns: Draws first values of the unknowns besides the images, for one client.
        images_of: Makes normalised images [N, m, C, H, W] of the unknowns, where images are none of them.
    """

    problems: Problems
    labels: Sequence[IntArray | None]
    findings: Sequence[Mapping[str, float]]
    other_unknowns: Callable[[torch.Generator], Tensors] = lambda generator: {}
    images_of: Callable[[Tensors], Tensor] | None = None


def reconstruct(
    clients: Sequence[Client],
    knowledge: PublicKnowledge,
    settings: AttackSettings,
    defaults: Optimisation,
    prepare: Callable[[Sequence[Client], Sequence[IntArray | None]], Batch],
) -> list[Reconstruction]:
    """Run an attack that searches for images: batch the clients, solve, and turn the points into pixels.

    The random starts are a function of seed, client's position and restart, not of the batching.

    Args:
        clients: What is known of each.
        knowledge: What all of them have in common.
        settings: How to run.
        defaults: The attack's own optimisation.
        prepare: Makes a batch of some clients and their known labels.

    Raises:
        ValueError: If there are labels, but not those of all samples.
    """
    known = known_labels(clients, settings)
    optimisation = settings.optimisation or defaults
    results: dict[int, Reconstruction] = {}
    for positions in _batches(clients, settings.at_once):
        began = time.perf_counter()
        batch = prepare([clients[i] for i in positions], [known[i] for i in positions])
        start = _starts(positions, clients[positions[0]].num_examples, batch, knowledge, settings)
        progress = _shifted(settings.progress, len(results), len(positions), len(clients))
        solution = solve(batch.problems, start, optimisation, progress)
        seconds = (time.perf_counter() - began) / len(positions)
        normalised = solution.unknowns[IMAGES] if batch.images_of is None else batch.images_of(solution.unknowns)
        found = to_pixels(normalised, knowledge)
        for row, position in enumerate(positions):
            results[position] = Reconstruction(
                images=found[row],
                labels=batch.labels[row],
                objective=float(solution.objective[row]),
                iterations=solution.iterations,
                seconds=seconds,
                findings=batch.findings[row],
            )
    return [results[position] for position in range(len(clients))]


def known_labels(clients: Sequence[Counted], settings: AttackSettings) -> list[IntArray | None]:
    """Return each client's labels, None where they are unknown.

    Raises:
        ValueError: If there are labels, but not one per sample of every client.
    """
    if settings.labels is None:
        return [None] * len(clients)
    sizes = [client.num_examples for client in clients]
    if [len(labels) for labels in settings.labels] != sizes:
        raise ValueError(f"labels must be given for all samples of all clients, or for none: {sizes}")
    return [np.asarray(labels, dtype=np.int64) for labels in settings.labels]


def build_structure(knowledge: PublicKnowledge) -> Target:
    """Return the target network without values, so that it can be called under `torch.func.vmap`.

    BatchNorm has each batch's own statistics in it, as in training, and keeps none.
    """
    return vmap_ready(build_target(knowledge.target, knowledge.input_shape, knowledge.num_classes))


def vmap_ready(network: Network) -> Network:
    """Replace layers that cannot be called under `torch.func.vmap`, in place."""
    for module in list(network.modules()):
        for name, child in module.named_children():
            setattr(module, name, _callable(child))
    return network


def _callable(layer: nn.Module) -> nn.Module:
    """Return what stands for a layer: a batch under `vmap` has no memory layout, and nothing may change in place."""
    if isinstance(layer, ChannelsLast):
        return nn.Identity()
    if getattr(layer, "inplace", False) is True:
        setattr(layer, "inplace", False)  # noqa: B010 - of a rectifier, whose type mypy does not know
    for plain in UNCOUNTED:
        if isinstance(layer, plain):
            with torch.device("meta"):
                return plain(layer.num_features, layer.eps, affine=layer.affine, track_running_stats=False)
    return layer


def stack(rows: Sequence[Mapping[str, Tensor]], device: torch.device) -> dict[str, Tensor]:
    """Return tensors with the same names as one batch [N, ...] on a device."""
    return {name: torch.stack([row[name] for row in rows]).to(device) for name in rows[0]}


def pixel_range(knowledge: PublicKnowledge, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return black and white after normalisation, each [C, 1, 1]."""
    mean, std = (torch.tensor(values).reshape(-1, 1, 1) for values in (knowledge.mean, knowledge.std))
    return (-mean / std).to(device), ((1 - mean) / std).to(device)


def _batches(clients: Sequence[Counted], at_once: int) -> Iterator[list[int]]:
    sizes: dict[int, list[int]] = {}
    for position, client in enumerate(clients):
        sizes.setdefault(client.num_examples, []).append(position)
    for positions in sizes.values():
        yield from (positions[first : first + at_once] for first in range(0, len(positions), at_once))


def _starts(
    positions: Sequence[int], num_images: int, batch: Batch, knowledge: PublicKnowledge, settings: AttackSettings
) -> Callable[[int], Tensors]:
    def start(restart: int) -> Tensors:
        rows: list[Tensors] = []
        for position in positions:
            generator = torch_generator(settings.seed, "attack", position, restart)
            images = {}
            if batch.images_of is None:
                images[IMAGES] = torch.randn(num_images, *knowledge.input_shape, generator=generator)
            rows.append({**images, **batch.other_unknowns(generator)})
        return stack(rows, settings.device)

    return start


def to_pixels(normalised: Tensor, knowledge: PublicKnowledge) -> FloatArray:
    """Return images [..., C, H, W] without the normalisation, cut to [0, 1]."""
    mean, std = (torch.tensor(values).reshape(-1, 1, 1) for values in (knowledge.mean, knowledge.std))
    images: FloatArray = (normalised.cpu() * std + mean).clamp(0, 1).numpy()
    return images


def _shifted(progress: Progress | None, done: int, now: int, total: int) -> Progress | None:
    """Return a progress callback for a batch of `now` clients, after `done` and of `total`."""
    if progress is None:
        return None
    return lambda step, steps: progress(done * steps + step * now, total * steps)
