"""Shared parts of all attacks: settings, result type, and batching of clients into independent problems."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hyperfl_flwr.attacks.image_space import ImageSpace
from hyperfl_flwr.attacks.knowledge import PublicKnowledge
from hyperfl_flwr.attacks.optimisation import Optimisation, Tensors
from hyperfl_flwr.attacks.optimiser_loop import IMAGES, LATENTS, Problems, Progress, solve
from hyperfl_flwr.core.rng import torch_generator
from hyperfl_flwr.models.layers.batchnorm import WITHOUT_COUNTER
from hyperfl_flwr.models.target import Target
from hyperfl_flwr.models.targets import ChannelsLast, build_target
from hyperfl_flwr.runs.observation import Observation

IntArray = NDArray[np.int64]

FloatArray = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class AttackSettings:
    """Settings of an attack's run, and the optional extra knowledge: labels and activations.

    Attributes:
        labels: Labels [n] of each client, if the scenario gives them to the server; otherwise None.
        hidden: HyperFL's activation z [p] of each client, if the server read it off an earlier single upload.
        public_images: Images [m, C, H, W] in [0, 1] of the clients' kind that anyone can get, for attacks of a server
            that is malicious; None for the others.
        optimisation: Settings of the optimisation; None uses the attack's defaults.
        space: Space in which images are searched for; None for that of all pixels.
        start: Images [n, C, H, W] in [0, 1] of each client from which the search for pixels begins; None for noise.
        seed: Seed of the random starts.
        device: Device on which the optimisation runs.
        clients_per_batch: Largest number of clients that are attacked together; it bounds the memory.
        progress: Called with the number of steps done and the total, over all clients.
    """

    labels: Sequence[IntArray] | None = None
    hidden: Sequence[Tensor] | None = None
    public_images: FloatArray | None = None
    optimisation: Optimisation | None = None
    space: ImageSpace | None = None
    start: Sequence[FloatArray] | None = None
    seed: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    clients_per_batch: int = 32
    progress: Progress | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Reconstruction:
    """Result of an attack on one client.

    Attributes:
        images: float32 [m, C, H, W], pixels in [0, 1], in no particular order; m = 0 if the attack reconstructs none.
        labels: Recovered or given labels, int64 [n]; None if the attack uses none.
        objective: Final value of the objective; 0 is a perfect match of the reply.
        iterations: Number of optimisation steps that were taken.
        seconds: Wall time of the batch divided by the number of its clients.
        findings: Diagnostic numbers of the readout of the reply, by name.
        label_counts: Estimated number of private samples of each class, float64 [K]; None if the
            attack does not estimate them.
        nothing_to_read: Why the reply holds nothing to read, so that nothing was tested; empty if it holds something.
    """

    images: FloatArray
    labels: IntArray | None = None
    label_counts: NDArray[np.float64] | None = None
    objective: float = float("nan")
    iterations: int = 0
    seconds: float = 0.0
    findings: Mapping[str, float] = field(default_factory=dict)
    nothing_to_read: str = ""


AttackFunction = Callable[[Sequence[Observation], PublicKnowledge, AttackSettings], list[Reconstruction]]
"""An attack: maps observations of one method, with shared knowledge, to one result each.

A sum is one observation; it may give one result for each client that the attack separates, in any order."""


class Counted(Protocol):
    """The target of an attack: an observation, or a readout of one."""

    @property
    def num_examples(self) -> int:
        """Number of training samples that it depends on."""


Client = TypeVar("Client", bound=Counted)

Network = TypeVar("Network", bound=nn.Module)


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Clients with equally many samples, prepared for `optimiser_loop.solve`.

    Attributes:
        problems: Their inversion problems, on the settings' device.
        labels: Labels int64 [n] of each client, or None.
        findings: Diagnostic numbers of each client.
        other_unknowns: Draws initial values of the unknowns other than the images, for one client.
        images_of: Computes normalised images [N, m, C, H, W] from the unknowns; None if the images are an unknown.
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
        clients: Observation or readout of each client.
        knowledge: Public knowledge that holds for all of them.
        settings: Settings of the run.
        defaults: Optimisation to use if the settings have none.
        prepare: Builds a batch from some clients and their known labels.

    Raises:
        ValueError: If labels are given, but not one per sample of every client.
    """
    known = known_labels(clients, settings)
    optimisation = settings.optimisation or defaults
    results: dict[int, Reconstruction] = {}
    for positions in _batches(clients, settings.clients_per_batch):
        began = time.perf_counter()
        batch = prepare([clients[i] for i in positions], [known[i] for i in positions])
        start = _starts(positions, clients[positions[0]].num_examples, batch, knowledge, settings)
        progress = _shifted(settings.progress, len(results), len(positions), len(clients))
        problems = _in_space(batch.problems, knowledge, settings)
        solution = solve(problems, start, optimisation, progress)
        seconds = (time.perf_counter() - began) / len(positions)
        images_of = batch.images_of or problems.all_images
        found = to_pixels(images_of(solution.unknowns), knowledge)
        for row, position in enumerate(positions):
            results[position] = Reconstruction(
                images=found[row],
                labels=batch.labels[row],
                objective=float(solution.objective[row]),
                iterations=solution.iterations[row],
                seconds=seconds,
                findings=batch.findings[row],
            )
    return [results[position] for position in range(len(clients))]


def known_labels(clients: Sequence[Counted], settings: AttackSettings) -> list[IntArray | None]:
    """Return the labels of each client, None for each if they are unknown.

    Raises:
        ValueError: If labels are given, but not one per sample of every client.
    """
    if settings.labels is None:
        return [None] * len(clients)
    sizes = [client.num_examples for client in clients]
    if [len(labels) for labels in settings.labels] != sizes:
        given = [len(labels) for labels in settings.labels]
        raise ValueError(f"{given} labels for clients with {sizes} samples: give one label per sample, or none")
    return [np.asarray(labels, dtype=np.int64) for labels in settings.labels]


def build_structure(knowledge: PublicKnowledge) -> Target:
    """Return the target network without values, so that it can be called under `torch.func.vmap`.

    BatchNorm uses the statistics of each batch, as in training, and keeps no running ones.
    """
    return vmap_ready(build_target(knowledge.target, knowledge.input_shape, knowledge.num_classes))


def vmap_ready(network: Network) -> Network:
    """Replace layers that cannot be called under `torch.func.vmap`, in place."""
    for module in list(network.modules()):
        for name, child in module.named_children():
            setattr(module, name, _callable(child))
    return network


def _callable(layer: nn.Module) -> nn.Module:
    """Return a replacement for a layer: under `vmap` a batch has no memory layout and nothing may change in place."""
    if isinstance(layer, ChannelsLast):
        return nn.Identity()
    if getattr(layer, "inplace", False) is True:
        setattr(layer, "inplace", False)  # noqa: B010 - mypy does not know the type of the activation
    for plain in WITHOUT_COUNTER:
        if isinstance(layer, plain):
            with torch.device("meta"):
                return plain(layer.num_features, layer.eps, affine=layer.affine, track_running_stats=False)
    return layer


def stack(rows: Sequence[Mapping[str, Tensor]], device: torch.device) -> dict[str, Tensor]:
    """Stack tensors of the same names into a batch [N, ...] on a device."""
    return {name: torch.stack([row[name] for row in rows]).to(device) for name in rows[0]}


def pixel_range(knowledge: PublicKnowledge, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return black and white after normalisation, each [C, 1, 1]."""
    mean, std = (torch.tensor(values).reshape(-1, 1, 1) for values in (knowledge.mean, knowledge.std))
    return (-mean / std).to(device), ((1 - mean) / std).to(device)


def _batches(clients: Sequence[Counted], clients_per_batch: int) -> Iterator[list[int]]:
    sizes: dict[int, list[int]] = {}
    for position, client in enumerate(clients):
        sizes.setdefault(client.num_examples, []).append(position)
    for positions in sizes.values():
        yield from (
            positions[first : first + clients_per_batch] for first in range(0, len(positions), clients_per_batch)
        )


def _starts(
    positions: Sequence[int], num_images: int, batch: Batch, knowledge: PublicKnowledge, settings: AttackSettings
) -> Callable[[int], Tensors]:
    def start(restart: int) -> Tensors:
        rows: list[Tensors] = []
        for position in positions:
            # Keyed by position, not by row: the start of a client does not depend on how clients are batched.
            generator = torch_generator(settings.seed, "attack", position, restart)
            images: Tensors = {}
            if batch.images_of is None:
                images = _first_images(position, num_images, generator, knowledge, settings)
            rows.append({**images, **batch.other_unknowns(generator)})
        return stack(rows, settings.device)

    return start


def _first_images(
    position: int, number: int, generator: torch.Generator, knowledge: PublicKnowledge, settings: AttackSettings
) -> Tensors:
    """Return the unknown that stands for a client's images, at the beginning of the search."""
    if settings.space is not None:
        return {LATENTS: settings.space.draw(number, generator)}
    if settings.start is not None:
        return {IMAGES: normalised_pixels(torch.from_numpy(settings.start[position]), knowledge)}
    return {IMAGES: torch.randn(number, *knowledge.input_shape, generator=generator)}


def _in_space(problems: Problems, knowledge: PublicKnowledge, settings: AttackSettings) -> Problems:
    """Return the problems with the space of the settings, if there is one."""
    space = settings.space
    if space is None:
        return problems
    constants = {name: value.to(settings.device) for name, value in space.constants.items()}
    return replace(problems, images_of=lambda latents: normalised_pixels(space.pixels(latents, constants), knowledge))


def normalised_pixels(pixels: Tensor, knowledge: PublicKnowledge) -> Tensor:
    """Return images [..., C, H, W], in which black is 0 and white is 1, as the target network gets them."""
    mean, std = (
        torch.tensor(values, device=pixels.device).reshape(-1, 1, 1) for values in (knowledge.mean, knowledge.std)
    )
    return (pixels - mean) / std


def to_pixels(normalised: Tensor, knowledge: PublicKnowledge) -> FloatArray:
    """Undo the normalisation of images [..., C, H, W] and clamp them to [0, 1]."""
    mean, std = (torch.tensor(values).reshape(-1, 1, 1) for values in (knowledge.mean, knowledge.std))
    images: FloatArray = (normalised.cpu() * std + mean).clamp(0, 1).numpy()
    return images


def _shifted(progress: Progress | None, done: int, now: int, total: int) -> Progress | None:
    """Return a progress callback for a batch of `now` clients, after `done` of `total` clients."""
    if progress is None:
        return None
    return lambda step, steps: progress(done * steps + step * now, total * steps)
