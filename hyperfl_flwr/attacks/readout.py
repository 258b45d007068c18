"""Read the feature extractor's parameters and gradient off a reply in closed form, without search, labels or secrets.

A step of SGD on parameters X with gradients G_j (after clipping), rate eta, momentum mu, weight decay lambda is linear,
including FedProx's pull c:

    b_j = mu b_(j-1) + lambda X_(j-1) + c (X_(j-1) - X_0) + G_j      X_j = X_(j-1) - eta b_j
    =>      X_k = a X_0 + sum_j p_j G_j

with scalars a, p_j that depend on the settings alone. So a reply gives `D = (X_k - a X_0) / sum_j p_j = sum_j w_j G_j`,
the mean of the steps' gradients with the known weights w_j = p_j / sum p, and the gradient itself after one step.

HyperFL sends its hypernetwork, z = relu(W1 v + b1), theta = z H + c. With g = dL/dtheta and d = dL/d(W1 v + b1)
the chain rule gives, for one step,

    D_H = z g^T      D_c = g      D_W1 = d v^T      D_b1 = d

two matrices of rank one, [D_H; D_c] and [D_W1 | D_b1]: dividing each by its last row or column gives the factors. The
server learns z, v, theta and g up to the rounding of the upload, at any rate and clipping: the embedding hides nothing.
After several steps D_c is the update that FedAvg or FedRep would have sent, and the heads give a mean of z over the
steps. If z moves much, v, which moves less, is read off the first layer, and z is computed from it. Without head
biases, D_H gives the direction of z and v its length. Only the leading singular vectors are used, so that noise of
equal size in all entries is averaged over the p + 1 copies of g.

Measured in float32 on the published network and Fashion-MNIST, relative error of theta: 2e-7 after one step; with the
scaled initialisation 2e-5 after five steps on one image and 4e-3 after the 60 steps of the published round; with
torch's initialisation 0.2 after 25 steps on 40 images, since theta then depends mostly on z.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hyperfl_flwr.attacks.knowledge import TrainingKnowledge
from hyperfl_flwr.attacks.nothing_to_read import NothingToReadError, require_gradient
from hyperfl_flwr.core.method import Form
from hyperfl_flwr.models.targets import build_target
from hyperfl_flwr.runs.observation import Arrays, Observation
from hyperfl_flwr.training.public_training import LocalSteps

CLASSIFIER = "classifier"
EXTRACTOR = "extractor"

RANK_THRESHOLD = 1e-3
"""Singular values below this share of the largest do not count for `rank`."""

DRIFT_THRESHOLD = 0.1
"""Second singular value of D_H, relative to the largest, above which z has moved too far in several steps to be read
off the heads; it is then computed from v."""

_ACTIVE = 1e-4
"""Units of z below this share of the largest are treated as inactive."""

_STATISTICS = (".running_mean", ".running_var")

_OTHER_GROUPS = ("encoder/", "embedding/", "control/", "labels/")
"""Groups that are not part of the target network."""

AFTER: Mapping[Form, Callable[[Tensor, Tensor], Tensor]] = {
    "values": lambda start, reply: reply,
    "increase": lambda start, reply: start + reply,
    "decrease": lambda start, reply: start - reply,
}
"""Functions from the parameters before local training and the sent values to those after it, by form."""

_RIDGE = 1e-4
"""Assumed error of the heads' z relative to that of the first layer's v."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Readout:
    """Input of the gradient attacks; tensors are float32 on the CPU, named as the target network's parameters.

    Attributes:
        parameters: Parameters that the client started from: of the extractor, and of the classifier if shared.
        gradient: Weighted mean of the steps' gradients at them, `sum_j w_j G_j`, under the same names.
        num_steps: Number of local steps k.
        num_examples: Number of training samples behind the gradient.
        embedding: HyperFL's v [d]; None if it could not be read.
        hidden: HyperFL's z [p]; None for other methods.
        force: PRIV-HFL's constant force, which the client adds to its gradients, under the same names; else empty.
        findings: Diagnostic numbers of HyperFL's readout: `rank` of [D_H, D_c], 1 after one step; its
            `second-singular-value` and the `rounding` of the upload, both relative to its largest singular value: after
            one step the relative error of z is about the latter; near 1 the gradient is lost in rounding.
    """

    parameters: Mapping[str, Tensor]
    gradient: Mapping[str, Tensor]
    num_steps: int
    num_examples: int
    embedding: Tensor | None = None
    hidden: Tensor | None = None
    force: Mapping[str, Tensor] = field(default_factory=dict)
    findings: Mapping[str, float] = field(default_factory=dict)

    @property
    def shares_classifier(self) -> bool:
        """Whether the readout includes the classifier."""
        return any(name.startswith(f"{CLASSIFIER}.") for name in self.parameters)


def sgd_scalars(steps: LocalSteps, number: int) -> tuple[float, NDArray[np.float64]]:
    """Return a and p [k] of `X_k = a X_0 + sum_j p_j G_j` for k steps of torch's SGD with empty initial buffers."""
    kept, buffered, weights, momenta = 1.0, 0.0, np.zeros(number), np.zeros(number)
    for step in range(number):
        buffered = steps.momentum * buffered + steps.weight_decay * kept + steps.pull * (kept - 1)
        kept -= steps.learning_rate * buffered
        momenta = steps.momentum * momenta + (steps.weight_decay + steps.pull) * weights
        momenta[step] += 1.0
        weights = weights - steps.learning_rate * momenta
    return kept, weights


def mean_gradients(observation: Observation, knowledge: TrainingKnowledge) -> dict[str, Tensor]:
    """Return `sum_j w_j G_j` of every shared parameter of target or hypernetwork in float64, by `group/name`.

    BatchNorm's running statistics have no gradient and are left out, as are an encoder and its target embeddings.
    """
    kept, weights = sgd_scalars(knowledge.steps, knowledge.num_steps(observation.num_examples))
    found = {}
    for key, before in observation.received.items():
        if key.endswith(_STATISTICS) or key.startswith(_OTHER_GROUPS):
            continue
        start, reply = _tensor(before), _tensor(observation.reply[key])
        found[key] = (AFTER[knowledge.form](start, reply) - kept * start) / weights.sum()
    return found


def read_out(observation: Observation, knowledge: TrainingKnowledge) -> Readout:
    """Read parameters and mean gradient of the target network off one client's reply.

    Args:
        observation: Observation of a model, a feature extractor or a hypernetwork.
        knowledge: Public knowledge of the run, which gives the weights w_j.

    Returns:
        The readout. That of a hypernetwork is exact up to rounding after one step, and after any number of steps if the
        embedding is frozen.

    Raises:
        ValueError: If the reply has other arrays, or, as `NothingToReadError`, does not differ from the broadcast.
    """
    means = mean_gradients(observation, knowledge)
    require_gradient(means, observation, knowledge)
    if "hypernetwork/head_weight" in means:
        return _hypernetwork_readout(observation.received, means, observation, knowledge)
    names = target_names(means)
    if unknown := means.keys() - names.keys():
        raise ValueError(f"cannot read the extractor off the arrays {', '.join(sorted(unknown))}")
    return Readout(
        parameters={name: _tensor(observation.received[key]).float() for key, name in names.items()},
        gradient={name: means[key].float() for key, name in names.items()},
        num_steps=knowledge.num_steps(observation.num_examples),
        num_examples=observation.num_examples,
    )


def target_names(keys: Iterable[str]) -> dict[str, str]:
    """Return the target network's name of each parameter that is sent as itself, by `group/name`, without others."""
    prefixes = {"model": "", "layers": "", EXTRACTOR: f"{EXTRACTOR}.", CLASSIFIER: f"{CLASSIFIER}."}
    parts = {key: key.partition("/") for key in keys}
    return {key: prefixes[group] + name for key, (group, _, name) in parts.items() if group in prefixes}


def _hypernetwork_readout(
    received: Arrays, means: Mapping[str, Tensor], observation: Observation, knowledge: TrainingKnowledge
) -> Readout:
    start = {key.partition("/")[2]: _tensor(value) for key, value in received.items()}
    change = {key.partition("/")[2]: value for key, value in means.items()}
    steps = knowledge.num_steps(observation.num_examples)
    embedding, of_first_layer = None, None
    form = knowledge.training.hypernetwork
    if not (form and form.embedding_frozen) and bool(change["hidden.weight"].any()):
        embedding = read_embedding(change)
        of_first_layer = torch.relu(start["hidden.weight"] @ embedding + start["hidden.bias"])
    hidden, gradient, singular = read_heads(change, of_first_layer, observation.client)
    if embedding is not None and steps == 1 and "head_bias" in change:
        embedding = refine_embedding(embedding, hidden, start)
    if of_first_layer is not None and steps > 1 and float(singular[1]) > DRIFT_THRESHOLD * float(singular[0]):
        hidden = of_first_layer
    # The rank-one factor is the gradient of one step only; with several, the bias holds the exact mean.
    if (steps > 1 or knowledge.summed_clients > 1) and "head_bias" in change:
        gradient = change["head_bias"]
    theta = hidden @ start["head_weight"] + start.get("head_bias", torch.zeros(()))
    return Readout(
        parameters=named_extractor(theta, knowledge),
        gradient=named_extractor(gradient, knowledge),
        num_steps=steps,
        num_examples=observation.num_examples,
        embedding=None if embedding is None else embedding.float(),
        hidden=hidden.float(),
        findings={
            "rank": float((singular > RANK_THRESHOLD * singular[0]).sum()),
            "second-singular-value": float(singular[1] / singular[0]),
            "rounding": _rounding(observation, knowledge) / float(singular[0]),
            "hidden-norm": float(hidden.norm()),
            "theta-norm": float(theta.norm()),
        },
    )


def _rounding(observation: Observation, knowledge: TrainingKnowledge) -> float:
    """Bound the norm of the error in the heads' mean gradients that rounding to float32 in every step causes."""
    steps = knowledge.num_steps(observation.num_examples)
    _, weights = sgd_scalars(knowledge.steps, steps)
    squared = sum(
        float(np.square(value, dtype=np.float64).sum())
        for key, value in observation.reply.items()
        if key.rpartition("/")[2].startswith("head_")
    )
    return float(steps * np.finfo(np.float32).eps / 2 * np.sqrt(squared) / abs(weights.sum()))


def read_embedding(change: Mapping[str, Tensor]) -> Tensor:
    """Return v [d] from the first layer's mean gradients `hidden.weight` [p, d] and `hidden.bias` [p].

    [D_W1 | D_b1] = d [v, 1]^T: the top right singular vector, divided by its last entry.
    """
    joint = torch.cat([change["hidden.weight"], change["hidden.bias"][:, None]], dim=1)
    right = torch.linalg.svd(joint, full_matrices=False).Vh[0]
    embedding: Tensor = right[:-1] / right[-1]
    return embedding


def refine_embedding(embedding: Tensor, hidden: Tensor, start: Mapping[str, Tensor]) -> Tensor:
    """Return v [d] corrected by an exact z: each active unit of z = W1 v + b1 is one more linear equation in v.

    The rounding of the upload leaves an error in the v of `read_embedding` if the first layer's gradient is small;
    the heads' z has almost none. Least squares on the active units, regularised towards the given embedding.

    Args:
        embedding: v [d] of `read_embedding`; returned unchanged if no unit is active.
        hidden: z [p] of `read_heads` after one step.
        start: The broadcast `hidden.weight` W1 [p, d] and `hidden.bias` b1 [p].
    """
    active = hidden > _ACTIVE * hidden.abs().max()
    if not active.any():
        return embedding
    weight = start["hidden.weight"][active]
    residual = hidden[active] - start["hidden.bias"][active] - weight @ embedding
    ridge = (_RIDGE * torch.linalg.matrix_norm(weight, 2)) ** 2 * torch.eye(len(embedding), dtype=weight.dtype)
    correction: Tensor = torch.linalg.solve(weight.T @ weight + ridge, weight.T @ residual)
    return embedding + correction


def read_heads(
    change: Mapping[str, Tensor], of_first_layer: Tensor | None, client: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return z [p], g [P] and the singular values from the heads' mean gradients.

    Args:
        change: `head_weight` D_H [p, P] and, if heads have biases, `head_bias` D_c [P].
        of_first_layer: z [p] computed from v, which gives the length of z if there are no biases.
        client: The client, for the error.

    Raises:
        NothingToReadError: If there are neither head biases nor a reading of v.
    """
    bias = change.get("head_bias")
    rows = change["head_weight"] if bias is None else torch.cat([change["head_weight"], bias[None]])
    values, vectors = torch.linalg.eigh(rows @ rows.T)
    singular = values.flip(0).clamp(min=0).sqrt()
    left = vectors[:, -1]
    if bias is not None:
        return left[:-1] / left[-1], (left @ rows) * left[-1], singular
    if of_first_layer is None:
        text = (
            "without head biases the length of z needs the first layer's gradient, but it is zero: frozen or inactive"
        )
        raise NothingToReadError(text, client)
    hidden = (left if float(left @ of_first_layer) > 0 else -left) * of_first_layer.norm()
    return hidden, hidden @ rows / hidden.square().sum(), singular


def named_extractor(flat: Tensor, knowledge: TrainingKnowledge) -> dict[str, Tensor]:
    """Split a vector [P] of the extractor's parameters into float32 tensors by the target's names.

    Raises:
        ValueError: If P is not the number of the extractor's parameters.
    """
    shapes = extractor_shapes(knowledge)
    sizes = [shape.numel() for shape in shapes.values()]
    if sum(sizes) != len(flat):
        raise ValueError(f"{knowledge.target} has {sum(sizes)} extractor parameters, the reply is about {len(flat)}")
    parts = torch.split(flat.float(), sizes)
    return {f"{EXTRACTOR}.{name}": part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def extractor_shapes(knowledge: TrainingKnowledge) -> dict[str, torch.Size]:
    """Return the shapes of the extractor's parameters by name, in the order of theta."""
    target = build_target(knowledge.target, knowledge.input_shape, knowledge.num_classes)
    return {name: parameter.shape for name, parameter in target.extractor.named_parameters()}


def _tensor(array: NDArray[Any]) -> Tensor:
    return torch.from_numpy(np.asarray(array, dtype=np.float64))
