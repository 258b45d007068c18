"""The clients behind a sum of HyperFL's uploads: every client's gradient travels in a channel of its own.

A secure aggregator shows the server only the mean of N replies. A reply is linear in the client's gradients (see
`hyperfl_flwr.attacks.readout`), so the mean of one step on each client, with shares w_i, gives

    D_H = sum_i w_i z_i g_i^T      D_c = sum_i w_i g_i

With R = [D_H; D_c] of p + 1 rows, the z_i (p numbers each) as rows of Z, the g_i (P numbers each) as rows of G, and
W = diag(w), that is

    R = [Z | 1]^T W G

which is p + 1 mixtures of the N gradients, of which FedAvg's server would see the last one only.

- Are the z_i known, G = W^-1 pinv([Z | 1]^T) R. Exact while [Z | 1] has rank N: N <= p + 1 and no two z_i equal.
- Are they not, the gradients of different images are nearly independent, sparse signals over the P parameters, and
  independent component analysis of the row space of R finds each up to a factor: s_i = g_i / a_i. The mixing matrix
  R pinv(S) has the columns w_i a_i [z_i; 1]: its last row gives the factors, the others divided by it z_i.

Either way theta_i = z_i H + c follows, and each client is attacked as if it had been seen alone. With N > p + 1 a
gradient is found up to its projection on a space of p + 1 dimensions, with a cosine of about sqrt((p + 1) / N) where
the plain sum has sqrt(1 / N): a narrow hypernetwork narrows the channels, and closes them only if p is far below N. One
z for all clients closes them: then R has rank one and tells what the plain sum tells. That is no protection of a small
crowd: five images are found in the plain sum of one step, too.

Measured on Fashion-MNIST, the published network, five clients with one image and an embedding of their own, mean PSNR
after 500 iterations: 34 dB with known z, 25 dB by independent components, 18 dB from the sum as one batch; with one z
for all, and so one theta, 10, 25 and 25 dB. Where all start from one z, the channels are open after the first round.

The leak is this project's observation. The separation of signals: Hyvarinen, Oja: "Independent Component Analysis:
Algorithms and Applications", Neural Networks 13, 2000 (FastICA). Several local steps are taken for one with the steps'
mean gradient, during which z must not move much.
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
from hyperfl_flwr.attacks.readout import Readout, mean_gradients, named_extractor
from hyperfl_flwr.core.rng import numpy_generator
from hyperfl_flwr.runs.observation import Observation

_ITERATIONS = 1000

_STARTS = 4
"""Of the analysis; single ones miss some of the components. The contrast `exp`, made for sparse signals, finds more of
five clients than `logcosh`, and `cube` hardly any."""

_ROUNDING = 3e-5
"""Singular values of [Z | 1], and of R, below this share of the largest are taken for rounding, not for a channel.

Measured on the published network: 3e-6 is rounding. 2e-4 was the smallest of five clients' that had all started from
one embedding, one to five rounds before."""


def channels_known(
    observations: Sequence[Observation], knowledge: PublicKnowledge, settings: AttackSettings
) -> list[Reconstruction]:
    """Reconstruct each client's images from a sum, with the clients' activations z from uploads seen alone.

    Args:
        observations: One, of `mean_observation`.
        knowledge: The settings, with the number of clients.
        settings: `hidden` has z [p] of each client.

    Returns:
        One result per client, in the order of `hidden`.

    Raises:
        ValueError: If there is not one sum of HyperFL's replies, or not one z per client.
    """
    (observation,) = observations
    if settings.hidden is None or len(settings.hidden) != knowledge.summed_clients:
        raise ValueError(f"channels-known needs the activations of all {knowledge.summed_clients} clients")
    hidden = torch.stack(list(settings.hidden)).double()
    gradients = separate_known(head_rows(observation, knowledge), hidden)
    return _invert(hidden, gradients, observation, knowledge, settings)


def channels_ica(
    observations: Sequence[Observation], knowledge: PublicKnowledge, settings: AttackSettings
) -> list[Reconstruction]:
    """Reconstruct each client's images from a sum with nothing else known.

    Args:
        observations: One, of `mean_observation`.
        knowledge: The settings, with the number of clients.
        settings: `hidden` is not used.

    Returns:
        One result per component, in no particular order; images are shared out among them evenly, rounded up.

    Raises:
        ValueError: If there is not one sum of HyperFL's replies.
    """
    (observation,) = observations
    rows = head_rows(observation, knowledge)
    hidden, gradients = separate_ica(rows, knowledge.summed_clients, settings.seed)
    return _invert(hidden, gradients, observation, knowledge, settings)


def head_rows(observation: Observation, knowledge: PublicKnowledge) -> Tensor:
    """Return R = [D_H; D_c] [p + 1, P] in float64.

    Raises:
        ValueError: If it is no reply of HyperFL.
    """
    change = mean_gradients(observation, knowledge)
    names = [f"hypernetwork/{name}" for name in ("head_weight", "head_bias")]
    if missing := [name for name in names if name not in change]:
        raise ValueError(f"channels are in the heads of a hypernetwork; the reply has no {missing}")
    return torch.cat([change[names[0]], change[names[1]][None]])


def separate_known(rows: Tensor, hidden: Tensor, shares: Tensor | None = None) -> Tensor:
    """Return the gradients G [N, P] behind a sum: G = W^-1 pinv([Z | 1]^T) R.

    Exact for N <= p + 1 different z_i in general position, up to the rounding of R and Z times the condition number of
    [Z | 1] with rows of length one. Beyond that, of all G that explain R, the one of least norm, with each g_i in units
    of 1 / (w_i |[z_i, 1]|): the projection on what was seen.

    Args:
        rows: R = [D_H; D_c], [p + 1, P].
        hidden: Z [N, p].
        shares: w [N], summing to 1; None is 1 / N for each.
    """
    mixing = torch.cat([hidden, torch.ones_like(hidden[:, :1])], dim=1).T
    if shares is None:
        shares = torch.full_like(hidden[:, 0], 1 / len(hidden))
    lengths = mixing.norm(dim=0)  # a client without a gradient has a z read off rounding, of any length
    gradients: Tensor = torch.linalg.pinv(mixing / lengths, rtol=_ROUNDING) @ rows / (lengths * shares)[:, None]
    return gradients


def separate_ica(rows: Tensor, num_clients: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return activations [r, p] and gradients [r, P] of the independent components of a sum of N equal shares.

    r is the rank of R, at most N: clients with (nearly) equal z stay together in one component.

    Args:
        rows: R = [D_H; D_c], [p + 1, P].
        num_clients: N.
        seed: Of the analysis' random start.
    """
    values, vectors = torch.linalg.eigh(rows @ rows.T)
    singular = values.flip(0).clamp(min=0).sqrt()
    rank = min(num_clients, int((singular > _ROUNDING * singular[0]).sum()))
    basis = vectors.flip(1)[:, :rank].T @ rows / singular[:rank, None]
    components = _unmixing(basis, seed) @ basis
    mixing = rows @ torch.linalg.pinv(components)
    factors = mixing[-1]
    # An activation is never negative: what is below zero is an error of the separation.
    return torch.relu(mixing[:-1] / factors).T, num_clients * factors[:, None] * components


def _unmixing(basis: Tensor, seed: int) -> Tensor:
    """Return [r, r]: independent components from orthonormal mixtures [r, P]; their means are not taken out.

    Of several starts the one that ends with the sparsest components, by their mean absolute value at unit variance.
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
            warnings.simplefilter("ignore", ConvergenceWarning)  # its best is what an attacker would use, too
            components = analysis.fit_transform(samples)
        found.append((float(np.abs(components).mean()), analysis.components_))
    best = min(found, key=lambda each: each[0])[1] if found else np.ones((1, 1))
    return torch.from_numpy(best).to(basis)


def _invert(
    hidden: Tensor, gradients: Tensor, observation: Observation, knowledge: PublicKnowledge, settings: AttackSettings
) -> list[Reconstruction]:
    """Search for the images of every channel: z [r, p] and g [r, P]."""
    start: Mapping[str, Tensor] = {
        name: torch.from_numpy(np.asarray(observation.received[f"hypernetwork/{name}"], dtype=np.float64))
        for name in ("head_weight", "head_bias")
    }
    theta = hidden @ start["head_weight"] + start["head_bias"]
    readings = [
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
    return invert(readings, lambda reading: reading, knowledge, settings)
