"""Reconstruct images from an extractor's parameters and gradient, without classifier, labels or embedding.

This project's attack on methods that share the feature extractor and keep the classifier private: FedRep, pFedHN-PC,
and HyperFL, since HyperFL's reply gives the same two things exactly (`hyperfl_flwr.attacks.readout`).

The last layer of the extractor, `a = W u + b`, has the gradients

    dL/dW = sum_n delta_n u_n^T      dL/db = sum_n delta_n      delta_n = dL/da_n

For one image delta is dL/db itself. For several, a candidate's inputs u_n(x) determine the deltas that explain the
observed [dL/dW | dL/db] best, in closed form (least squares with a small ridge on normalised rows). In both cases the
gradient of all layers below is the vector-Jacobian product of u(x) with delta_n W. The gradient of the whole extractor
at a candidate is thus simulated without the layers above it, and compared with the observed one.

The last adapter in a pre-trained body, followed by the mean over positions, is such a layer, too: with the adapter
`y = s2 (x + W (s1 x + t1)) + t2`, W has the inputs u = mean of (s1 x + t1) over positions, and t2 has the gradient
dL/db without the factor s2. The gradient of all adapters is then the vector-Jacobian product of the body's features.

The reply of several local steps is treated as one step from the broadcast with the steps' mean gradient.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from hyperfl_flwr.attacks.base import (
    AttackSettings,
    Batch,
    Client,
    IntArray,
    Reconstruction,
    build_structure,
    pixel_range,
    reconstruct,
    stack,
)
from hyperfl_flwr.attacks.knowledge import PublicKnowledge
from hyperfl_flwr.attacks.last_layer import LastLayer, last_layer_of
from hyperfl_flwr.attacks.optimisation import Optimisation, Tensors
from hyperfl_flwr.attacks.optimiser_loop import IMAGES, Problems
from hyperfl_flwr.attacks.readout import EXTRACTOR, Readout, read_out
from hyperfl_flwr.runs.observation import Observation

DEFAULTS = Optimisation(iterations=2000, learning_rate=1.0, signed=True, total_variation=3e-3, polish=500)
"""Defaults, tuned on single images of Fashion-MNIST: at the papers' rate of 0.1 the same search ends 10 dB lower.
Against a reply with noise, a prior weight of 0.03 to 0.1 finds more: an audit of a defence must try it as well."""

_RIDGE = 1e-4
"""Ridge for rows of unit length; it keeps the system regular for candidates with nearly equal inputs."""


def head_gradient(
    observations: Sequence[Observation], knowledge: PublicKnowledge, settings: AttackSettings
) -> list[Reconstruction]:
    """Reconstruct the images behind the gradient of a feature extractor.

    Args:
        observations: Observations of any method that `read_out` supports; a shared classifier is not used. A sum of
            clients is treated as one client with all their images.
        knowledge: Public knowledge of the run.
        settings: Settings of the attack; labels are ignored.

    Returns:
        n images per client.

    Raises:
        ValueError: If the attack cannot use the extractor, see `check_extractor`.
    """
    return invert(observations, lambda observation: read_out(observation, knowledge), knowledge, settings)


def invert(
    clients: Sequence[Client],
    read: Callable[[Client], Readout],
    knowledge: PublicKnowledge,
    settings: AttackSettings,
    extractor: nn.Module | None = None,
    *,
    last_layer_only: bool = False,
) -> list[Reconstruction]:
    """Reconstruct the images behind gradients of a feature extractor, from any source.

    Args:
        clients: Observation or readout of each client.
        read: Returns parameters and gradient of one client; called per batch, to bound the memory.
        knowledge: Public knowledge of the run.
        settings: Settings of the attack; labels are ignored.
        extractor: Network of the gradients, ready for `vmap`; None uses the target network's extractor.
        last_layer_only: Whether only the gradient of the extractor's last layer with parameters is compared.

    Returns:
        n images per client.

    Raises:
        ValueError: If the attack cannot use the extractor, see `check_extractor`.
    """
    last = last_layer_of(build_structure(knowledge).extractor if extractor is None else extractor)
    device = settings.device

    def prepare(chosen: Sequence[Client], labels: Sequence[IntArray | None]) -> Batch:
        readouts = [read(client) for client in chosen]
        low, high = pixel_range(knowledge, device)
        gradients = [_extractor_only(readout.gradient) for readout in readouts]
        parameters = [_extractor_only(readout.parameters) for readout in readouts]
        rows = [{_ROWS: last.rows(*of_client)} for of_client in zip(parameters, gradients, strict=True)]
        problems = Problems(
            simulate=_simulation(last, chosen[0].num_examples, last_layer_only=last_layer_only),
            observed=stack(rows if last_layer_only else gradients, device),
            constants=stack([{**own, **row} for own, row in zip(parameters, rows, strict=True)], device),
            low=low,
            high=high,
        )
        return Batch(
            problems=problems, labels=[None] * len(chosen), findings=[readout.findings for readout in readouts]
        )

    return reconstruct(clients, knowledge, settings, DEFAULTS, prepare)


def check_extractor(knowledge: PublicKnowledge) -> None:
    """Check that the attack can use the extractor of a run's target network.

    Raises:
        ValueError: If the last layer with parameters is neither linear, in a sequence, nor an adapter of maps of a
            pre-trained body of which the features are means over positions.
    """
    last_layer_of(build_structure(knowledge).extractor)


def least_squares_cotangents(inputs: Tensor, rows: Tensor) -> Tensor:
    """Return the deltas [B, F] that explain a linear layer's gradient best, given the layer's inputs.

    argmin over delta of |M - delta^T [U, 1]|^2, with a ridge of 1e-4 on the normalised rows of [U, 1].

    Args:
        inputs: U [B, D].
        rows: M = [dL/dW | dL/db], [F, D + 1].
    """
    extended = torch.cat([inputs, torch.ones_like(inputs[:, :1])], dim=1)
    lengths = extended.norm(dim=1, keepdim=True)
    extended = extended / lengths
    delta: Tensor
    # (E E^T + r 1)^-1 E = E (E^T E + r 1)^-1: the smaller of both systems, as a sum can be of many thousand images.
    if len(extended) <= extended.shape[1]:
        delta = torch.linalg.solve(_with_ridge(extended @ extended.T), extended @ rows.T) / lengths
    else:
        delta = extended @ torch.linalg.solve(_with_ridge(extended.T @ extended), rows.T) / lengths
    return delta


def _with_ridge(products: Tensor) -> Tensor:
    return products + _RIDGE * torch.eye(len(products), dtype=products.dtype, device=products.device)


_ROWS = "rows"


def _simulation(last: LastLayer, num_images: int, *, last_layer_only: bool) -> Callable[[Tensors, Tensors], Tensors]:
    def simulate(unknowns: Tensors, constants: Tensors) -> Tensors:
        inputs, gradient = last.forward(constants, unknowns[IMAGES])
        rows = constants[_ROWS]
        # With one image the layer's bias gradient is delta itself.
        delta = rows[:, -1:].T if num_images == 1 else least_squares_cotangents(inputs, rows)
        if last_layer_only:
            return {_ROWS: delta.T @ torch.cat([inputs, torch.ones_like(inputs[:, :1])], dim=1)}
        return gradient(delta)

    return simulate


def _extractor_only(values: Tensors) -> dict[str, Tensor]:
    prefix = f"{EXTRACTOR}."
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
