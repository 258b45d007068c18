"""Separate the clients in a sum of HyperFL's uploads: each client's gradient occupies a separate channel.

A secure aggregator shows the server only the mean of N replies. A reply is linear in the client's gradients (see
`hyperfl_flwr.attacks.readout`), so the mean of one step on each client, with shares w_i, gives

    D_H = sum_i w_i z_i g_i^T      D_c = sum_i w_i g_i

With R = [D_H; D_c] of p + 1 rows, the z_i (p numbers each) as rows of Z, the g_i (P numbers each) as rows of G, and
W = diag(w), that is

    R = [Z | 1]^T W G

which is p + 1 mixtures of the N gradients. FedAvg's server would see the last one only.

- If the z_i are known, G = W^-1 pinv([Z | 1]^T) R. Exact while [Z | 1] has rank N: N <= p + 1 and no two z_i equal.
- If they are unknown, the gradients of different images are nearly independent, sparse signals over the P parameters.
  Independent component analysis of the row space of R finds each up to a factor: s_i = g_i / a_i. The mixing matrix
  R pinv(S) has the columns w_i a_i [z_i; 1]: its last row gives the factors, the others divided by it give z_i.

In both cases theta_i = z_i H + c follows, and each client is attacked as if it had been seen alone. With N > p + 1 a
gradient is found up to its projection on a space of p + 1 dimensions, with a cosine of about sqrt((p + 1) / N) where
the plain sum has sqrt(1 / N): a narrow hypernetwork narrows the channels, and closes them only if p is far below N. One
z for all clients closes them: then R has rank one and holds no more than the plain sum. This does not protect a small
group: five images are also found in the plain sum of one step.

Measured on Fashion-MNIST, the published network, five clients with one image and different embeddings, mean PSNR after
500 iterations: 34 dB with known z, 25 dB by independent components, 18 dB from the sum as one batch; with one z for
all, and so one theta, 10, 25 and 25 dB. If all clients start from one z, the channels are open after the first round.

The leak is this project's observation. The separation of signals: Hyvarinen, Oja: "Independent Component Analysis:
Algorithms and Applications", Neural Networks 13, 2000 (FastICA). Several local steps are treated as one step with their
mean gradient; z must not move much during them.
"""

import warnings
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hyperfl_flwr.attacks.base import AttackSettings, Reconstruction
from hyperfl_flwr.attacks.head_gradient import invert
from hyperfl_flwr.attacks.knowledge import PublicKnowledge
from hyperfl_flwr.attacks.nothing_to_read import NothingToReadError, require_gradient
from hyperfl_flwr.attacks.readout import Readout, mean_gradients, named_extractor
from hyperfl_flwr.core.rng import numpy_generator
from hyperfl_flwr.runs.observation import Observation

_ITERATIONS = 1000

_STARTS = 4
"""Number of random starts of the analysis; a single one misses some components. The contrast `exp`, for sparse signals,
finds more of five clients than `logcosh`; `cube` finds hardly any."""

_ROUNDING = 3e-5
"""Singular values of [Z | 1], and of R, below this share of the largest are treated as rounding, not as a channel.

Measured on the published network: rounding is at 3e-6. The smallest value of five clients that had all started from one
embedding, one to five rounds before, was 2e-4."""


def channels_known(
    observations: Sequence[Observation], knowledge: PublicKnowledge, settings: AttackSettings
) -> list[Reconstruction]:
    """Reconstruct each client's images from a sum, given the clients' activations z from earlier single uploads.

    Args:
        observations: A single observation, as `mean_observation` returns it.
        knowledge: Public knowledge, with the number of summed clients.
        settings: Settings of the attack; `hidden` is z [p] of each client.

    Returns:
        One result per client, in the order of `hidden`.

    Raises:
        ValueError: If the input is not one sum of HyperFL's replies, or does not have one z per client.
    """
    (observation,) = observations
    if settings.hidden is None or len(settings.hidden) != knowledge.summed_clients:
        raise NothingToReadError(f"channels-known needs the activations of all {knowledge.summed_clients} clients")
    hidden = torch.stack(list(settings.hidden)).double()
    gradients = separate_known(head_rows(observation, knowledge), hidden)
    return _invert(hidden, gradients, observation, knowledge, settings)


def channels_ica(
    observations: Sequence[Observation], knowledge: PublicKnowledge, settings: AttackSettings
) -> list[Reconstruction]:
    """Reconstruct each client's images from a sum alone.

    Args:
        observations: A single observation, as `mean_observation` returns it.
        knowledge: Public knowledge, with the number of summed clients.
        settings: Settings of the attack; `hidden` is not used.

    Returns:
        One result per component, in no particular order; the images are divided among them evenly, rounded up.

    Raises:
        ValueError: If the input is not one sum of HyperFL's replies.
    """
    (observation,) = observations
    rows = head_rows(observation, knowledge)
    hidden, gradients = separate_ica(rows, knowledge.summed_clients, settings.seed)
    return _invert(hidden, gradients, observation, knowledge, settings)


def head_rows(observation: Observation, knowledge: PublicKnowledge) -> Tensor:
    """Return R = [D_H; D_c] [p + 1, P] in float64.

    Raises:
        ValueError: If the observation is not a reply of HyperFL.
    """
    change = mean_gradients(observation, knowledge)
    names = [f"hypernetwork/{name}" for name in ("head_weight", "head_bias")]
    if missing := [name for name in names if name not in change]:
        raise ValueError(f"channels are read off the heads of a hypernetwork, but the reply lacks {missing}")
    require_gradient({name: change[name] for name in names}, observation, knowledge)
    return torch.cat([change[names[0]], change[names[1]][None]])


def separate_known(rows: Tensor, hidden: Tensor, shares: Tensor | None = None) -> Tensor:
    """Return the gradients G [N, P] behind a sum: G = W^-1 pinv([Z | 1]^T) R.

    Exact for N <= p + 1 different z_i in general position, up to the rounding of R and Z times the condition number of
    [Z | 1] with rows of length one. For larger N it is the G of least norm among all that explain R, with each g_i in
    units of 1 / (w_i |[z_i, 1]|): the projection on the observed space.

    Args:
        rows: R = [D_H; D_c], [p + 1, P].
        hidden: Z [N, p].
        shares: w [N], summing to 1; None means 1 / N for each.
    """
    mixing = torch.cat([hidden, torch.ones_like(hidden[:, :1])], dim=1).T
    if shares is None:
        shares = torch.full_like(hidden[:, 0], 1 / len(hidden))
    # A client without a gradient has a z that was read off rounding and may have any length.
    lengths = mixing.norm(dim=0)
    gradients: Tensor = torch.linalg.pinv(mixing / lengths, rtol=_ROUNDING) @ rows / (lengths * shares)[:, None]
    return gradients


def separate_ica(rows: Tensor, num_clients: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return activations [r, p] and gradients [r, P] of the independent components of a sum of N equal shares.

    r is the rank of R, at most N: clients with (nearly) equal z stay together in one component.

    Args:
        rows: R = [D_H; D_c], [p + 1, P].
        num_clients: N.
        seed: Seed of the random starts of the analysis.
    """
    values, vectors = torch.linalg.eigh(rows @ rows.T)
    singular = values.flip(0).clamp(min=0).sqrt()
    rank = min(num_clients, int((singular > _ROUNDING * singular[0]).sum()))
    basis = vectors.flip(1)[:, :rank].T @ rows / singular[:rank, None]
    components = _unmixing(basis, seed) @ basis
    mixing = rows @ torch.linalg.pinv(components)
    factors = mixing[-1]
    # An activation (after ReLU) is never negative: values below zero are errors of the separation.
    return torch.relu(mixing[:-1] / factors).T, num_clients * factors[:, None] * components


def _unmixing(basis: Tensor, seed: int) -> Tensor:
    """Return the unmixing matrix [r, r] from orthonormal mixtures [r, P] to independent components, without centring.

    Of several starts, take the one with the sparsest components, by their mean absolute value at unit variance.
    """
    from sklearn.decomposition import FastICA  # deferred: takes a second, and no other attack needs it
    from sklearn.exceptions import ConvergenceWarning

    rank, length = basis.shape
    samples = basis.T.numpy() * np.sqrt(length)
    found: list[tuple[float, NDArray[np.float64]]] = []
    for number in range(_STARTS if rank > 1 else 0):
        start = numpy_generator(seed, "channels", number).standard_normal((rank, rank))
        analysis = FastICA(whiten="unit-variance", fun="exp", max_iter=_ITERATIONS, w_init=start)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # an attacker would use the best iterate, too
            components = analysis.fit_transform(samples)
        found.append((float(np.abs(components).mean()), analysis.components_))
    best = min(found, key=lambda candidate: candidate[0])[1] if found else np.ones((1, 1))
    return torch.from_numpy(best).to(basis)


def _invert(
    hidden: Tensor, gradients: Tensor, observation: Observation, knowledge: PublicKnowledge, settings: AttackSettings
) -> list[Reconstruction]:
    """Search for the images of every channel, given activations z [r, p] and gradients g [r, P]."""
    start: Mapping[str, Tensor] = {
        name: torch.from_numpy(np.asarray(observation.received[f"hypernetwork/{name}"], dtype=np.float64))
        for name in ("head_weight", "head_bias")
    }
    theta = hidden @ start["head_weight"] + start["head_bias"]
    readouts = [
        Readout(
            parameters=named_extractor(own, knowledge),
            gradient=named_extractor(gradient, knowledge),
            num_steps=knowledge.num_steps(observation.num_examples),
            num_examples=-(-observation.num_examples // len(gradients)),
            hidden=activation.float(),
            findings={"channels": float(len(gradients)), "hidden-norm": float(activation.norm())},
        )
        for activation, own, gradient in zip(hidden, theta, gradients, strict=True)
    ]
    return invert(readouts, lambda readout: readout, knowledge, settings)
