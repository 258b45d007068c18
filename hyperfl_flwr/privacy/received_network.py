"""Statistics of a network that a client has received, by which a node notices networks made to reveal its samples.

All are computed from the network's values and what it does on some of the client's own training samples, before
anything is trained. With n samples and the units j of a layer let A_j be the set of the samples for which unit j's
activation is above 0 (of a convolution: anywhere in the image).

===========  ==========================================================================================================
statistic    value in a layer
===========  ==========================================================================================================
change       |w - w'| / min(|w|, |w'|), with the layer's parameters w and those w' that the client received last;
             infinite for a layer of another size
duplicates   share of units whose rows of weights are parallel to another unit's
dead         share of units with empty A_j, minus that in the network received last
nested       length of the longest chain A_j < A_k < ... of strict subsets, as a share of the different sets A_j that
             are neither empty nor all samples
rare         share of the units with non-empty A_j that have at most n / 20 samples in it
loss-jump    loss minus that of the network received last, in units of the loss of a network that returns 0
===========  ==========================================================================================================

Fowl, Geiping, Czaja, Goldblum, Goldstein: "Robbing the Fed", ICLR 2022, section 3: all rows of a layer are one vector,
and the biases divide its values into bins, so that differences of neighbouring units' gradients hold the samples of one
bin. The rows are then `duplicates`, and whatever the rows are, the sets of bins are `nested`.

Boenisch, Dziedzic, Schuster, Shamsabadi, Shumailov, Papernot: "When the Curious Abandon Honesty", EuroS&P 2023, section
5: the negative weights of each row are scaled until a unit is active for few samples, so that its gradient holds one of
them. The units are then `rare`.

Pasquini, Francati, Ateniese: "Eluding Secure Aggregation in Federated Learning via Model Inconsistency", CCS 2022,
section 4: all clients but one receive layers whose units are `dead`, and so gradients of 0.

Wen, Geiping, Fowl, Goldblum, Goldstein: "Fishing for User Data in Large-Batch Federated Learning via Gradient
Magnification", ICML 2022, section 3: a classifier that is certain of one class makes the gradients of most samples
vanish. Its `loss-jump` is large.
"""

import math
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from hyperfl_flwr.models.losses import loss_of
from hyperfl_flwr.privacy.active_units import outputs_and_active_units

Statistic = Literal["change", "duplicates", "dead", "nested", "rare", "loss-jump"]

STATISTICS: tuple[Statistic, ...] = get_args(Statistic)

COMPARING: frozenset[Statistic] = frozenset({"change", "dead", "loss-jump"})
"""Those that compare a network with the one received last."""

PARALLEL = 0.9999
"""Least absolute cosine of two rows that are parallel."""

FEWEST_INPUTS = 4
"""Least length of the rows that are compared; shorter ones are often parallel by chance."""

FEWEST_SETS = 8
"""Least number of different sets A_j of a layer in which chains are looked for."""

FEWEST_SAMPLES = 20
"""Least number of samples for `nested` and `rare`: of few samples most sets have few, and many are nested by chance."""

RARE = 20
"""A rare unit is active for at most one in `RARE` samples."""

MOST_UNITS = 1024
"""Largest number of units of a layer that are compared with each other; of more, some that the node draws."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The largest value of a statistic.

    Attributes:
        statistic: The statistic.
        value: Its value; NaN or infinite if the network's numbers are.
        layer: The layer that has it; empty for the whole network.
    """

    statistic: Statistic
    value: float
    layer: str = ""


@dataclass(frozen=True, kw_only=True)
class ReceivedNetwork:
    """Values and behaviour of a received network, to compare the next one with.

    Attributes:
        layers: The received parameters of each layer, as one vector.
        dead: Share of dead units of each layer with an activation.
        loss: Mean loss on the samples.
        measured: The largest value of each statistic that is known.
    """

    layers: Mapping[str, Tensor]
    dead: Mapping[str, float]
    loss: float
    measured: Sequence[Measured] = ()


@torch.no_grad()
def measured_network(
    network: nn.Module,
    samples: Tensor,
    labels: Tensor,
    *,
    received: Collection[str],
    last: ReceivedNetwork | None,
    batch_size: int,
) -> ReceivedNetwork:
    """Measure a received network; it must be in evaluation mode and is not changed.

    Args:
        network: The network with the received values.
        samples: Samples of the client [n, ...], at least one.
        labels: Their labels, see `hyperfl_flwr.models.losses`.
        received: Names of the parameters that follow from what the server has sent; layers without any are left out,
            and so are activations before the first of them.
        last: What this function has returned for the network that the client received last; None if there was none.
        batch_size: Largest number of samples that the network is given at once.
    """
    layers: dict[str, list[Tensor]] = {}
    for name, parameter in network.named_parameters():
        if name in received:
            layers.setdefault(name.rpartition(".")[0], []).append(parameter.detach().float().flatten().cpu())
    vectors = {name: torch.cat(parts) for name, parts in layers.items()}
    outputs, active = outputs_and_active_units(network, torch.split(samples, batch_size), vectors)
    loss = float(loss_of(outputs.float(), labels))
    dead = {name: _share(~sets.any(dim=0)) for name, sets in active.items()}
    found: list[Measured] = [*_changes(vectors, last), *_duplicates(network, vectors)]
    found += [_at("dead", name, share - (last.dead.get(name, 0.0) if last else 0.0)) for name, share in dead.items()]
    if len(samples) >= FEWEST_SAMPLES:
        found += [_at("nested", name, nested_share(sets)) for name, sets in active.items()]
        found += [_at("rare", name, rare_share(sets)) for name, sets in active.items()]
    if last is not None:  # the loss of an initial network may be anything
        unit = float(loss_of(torch.zeros_like(outputs, dtype=torch.float32), labels)) or 1.0
        found.append(_at("loss-jump", "", (loss - last.loss) / unit))
    return ReceivedNetwork(layers=vectors, dead=dead, loss=loss, measured=tuple(_largest(found)))


def parallel_share(rows: Tensor) -> float:
    """Return the share of rows [U, D] that are parallel to another one; rows of zeros are parallel to each other."""
    rows = _some(rows)
    norms = rows.norm(dim=1)
    units = rows / norms.where(norms > 0, 1)[:, None]
    alike = (units @ units.T).abs() >= PARALLEL
    alike |= (norms == 0) & (norms == 0)[:, None]
    return _share(alike.fill_diagonal_(fill_value=False).any(dim=1))


def nested_share(active: Tensor) -> float:
    """Return the length of the longest chain of strict subsets as a share of the different sets; 0 for few sets.

    Args:
        active: Whether each unit is active for each sample, bool [n, U].
    """
    sets = torch.unique(active.T, dim=0)
    sizes = sets.sum(dim=1)
    sets = _some(sets[(sizes > 0) & (sizes < len(active))])
    if len(sets) < FEWEST_SETS:
        return 0.0
    sets = sets[sets.sum(dim=1).argsort()].float()
    inside = sets @ (1 - sets).T == 0  # [j, k]: A_j lies in A_k; different sets, so strictly or j = k
    lengths = torch.ones(len(sets), dtype=torch.int64)
    for number in range(1, len(sets)):  # by size: subsets come first
        below = lengths[:number][inside[:number, number]]
        lengths[number] = 1 + (int(below.max()) if len(below) else 0)
    return float(lengths.max()) / len(sets)


def rare_share(active: Tensor) -> float:
    """Return the share of the units with active samples that have few of them, at most one in `RARE`.

    Args:
        active: Whether each unit is active for each sample, bool [n, U].
    """
    counts = active.sum(dim=0)
    alive = counts[counts > 0]
    return _share(alive <= max(1, len(active) // RARE)) if len(alive) else 0.0


def _changes(vectors: Mapping[str, Tensor], last: ReceivedNetwork | None) -> Iterator[Measured]:
    for name, vector in vectors.items():
        before = last.layers.get(name) if last else None
        if before is not None and before.shape != vector.shape:
            yield _at("change", name, math.inf)
        elif before is not None:
            # By the smaller norm: after a large layer any small one would otherwise be near.
            change, norm = float((vector - before).norm()), float(min(vector.norm(), before.norm()))
            yield _at("change", name, change / norm if norm else (math.inf if change else 0.0))


def _duplicates(network: nn.Module, layers: Collection[str]) -> Iterator[Measured]:
    for name in layers:
        weight: Any = getattr(network.get_submodule(name), "weight", None)
        if isinstance(weight, Tensor) and weight.ndim > 1 and weight[0].numel() >= FEWEST_INPUTS:
            yield _at("duplicates", name, parallel_share(weight.detach().float().flatten(1).cpu()))


def _at(statistic: Statistic, layer: str, value: float) -> Measured:
    return Measured(statistic=statistic, layer=layer, value=value)


def _largest(found: Sequence[Measured]) -> Iterator[Measured]:
    """Yield the largest value of each statistic; one that is not finite is the largest."""
    for statistic in STATISTICS:
        if own := [each for each in found if each.statistic == statistic]:
            yield max(own, key=lambda each: each.value if math.isfinite(each.value) else math.inf)


def _share(of: Tensor) -> float:
    return float(of.float().mean())


def _some(rows: Tensor) -> Tensor:
    """Return at most `MOST_UNITS` rows; of more, ones that no server can know before."""
    if len(rows) <= MOST_UNITS:
        return rows
    rng = torch.Generator().manual_seed(secrets.randbits(63))  # torch's own numbers must stay as they are
    return rows[torch.randperm(len(rows), generator=rng)[:MOST_UNITS]]
