"""Attack PRIV-HFL by summing changes: they give every client's model and the gradient of its latest local steps.

All clients start from parameters that follow from the seed, and each reply is the change of the client's model, so that
theta_i = theta(0) + the sum of the counted changes. In the chain the server has sent the force r_i itself. In
the mean form it computes the client's multiplier mu_i = kappa beta (A_i - S) as the client does, since it knows x_i in
all rounds; for that it must see the client's own reply, as it does with one client per node.

The local steps follow gradient + force, with a constant force. With the scalars of `readout` therefore

    change = (a - 1) theta_i + sum_j p_j (G_j + force)

which gives `sum_j w_j G_j`, after one step the gradient itself. The images are then searched for as in `ig`.

With distillation this is a mixture: the gradient of the loss on the client's images plus that on pseudo-data. One step
on n images and n pseudo-samples is one step on 2 n images at twice the gradient, and the attack searches for all of
them. In other cases, and with known labels (which do not cover the pseudo-data), the mixture is treated as the gradient
of the images alone (`mixture` in the findings is 1), and the attack is weaker than it could be.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from hyperfl_flwr.attacks.base import AttackSettings, Reconstruction
from hyperfl_flwr.attacks.ig import invert
from hyperfl_flwr.attacks.knowledge import PublicKnowledge
from hyperfl_flwr.attacks.nothing_to_read import NothingToReadError
from hyperfl_flwr.attacks.readout import Readout, sgd_scalars
from hyperfl_flwr.core.rng import torch_generator
from hyperfl_flwr.models.initialisation import ordinary_parameters
from hyperfl_flwr.models.targets import build_target
from hyperfl_flwr.runs.observation import Observation
from hyperfl_flwr.training.dual_averaging import DualRule, MeanClient

_KEYS = {"mean": "changes/theta", "chain": "force/theta"}


def dual_difference(
    observations: Sequence[Observation], knowledge: PublicKnowledge, settings: AttackSettings
) -> list[Reconstruction]:
    """Reconstruct the images behind the change of a client's model.

    Args:
        observations: Changes of models that clients keep, with all earlier observations of the same clients.
        knowledge: Public knowledge, with the dual rule and the seed.
        settings: Settings of the attack; without labels, `recover_labels` estimates them.
    """
    if settings.labels is not None or not all(_halves(observation, knowledge) for observation in observations):
        return invert(observations, knowledge, settings, read_change)
    doubled = [replace(observation, num_examples=2 * observation.num_examples) for observation in observations]
    steps = knowledge.steps
    doubled_steps = replace(steps, batch_size=2 * steps.batch_size, clip_norm=steps.clip_norm / 2)
    results = invert(doubled, knowledge.with_steps(doubled_steps), settings, _read_halves)
    return [replace(result, labels=None) for result in results]  # they include the labels of the pseudo-data


def _halves(observation: Observation, knowledge: PublicKnowledge) -> bool:
    """Return whether the change is one step on all of the client's images and on equally many pseudo-samples."""
    number, size, generator = observation.num_examples, knowledge.steps.batch_size, knowledge.training.generator
    is_one_step = knowledge.num_steps(number) == 1 and number <= size
    return is_one_step and generator is not None and number == min(size, generator.pseudo_samples)


def _read_halves(observation: Observation, knowledge: PublicKnowledge) -> Readout:
    """Return the mean gradient of images and pseudo-data together."""
    readout = read_change(observation, knowledge)
    gradient = {name: value / 2 for name, value in readout.gradient.items()}
    return replace(readout, gradient=gradient, findings={**readout.findings, "mixture": 0.0})


def read_change(observation: Observation, knowledge: PublicKnowledge) -> Readout:
    """Rebuild the client's model, the force on it, and the mean gradient of its local steps.

    Args:
        observation: Observation of one client in one round, with those of all earlier rounds in which it replied.
        knowledge: Public knowledge, with the dual rule and the seed.

    Returns:
        The readout, with the parameters at the beginning of the round. Exact up to rounding, unless
        `priv-hfl.mixing`, clipping or noise was used.

    Raises:
        NothingToReadError: If the change is zero.
        ValueError: If the clients have no dual variables.
    """
    rule = _rule(knowledge)
    key = _KEYS[rule.realisation]
    moved, force = _followed(observation, rule, key)
    start = _start(knowledge)
    theta = _vector(start) + moved
    change = _array(observation, key)
    if not bool(change.any()):
        raise NothingToReadError("the change is zero: the client has learned nothing to attack", observation.client)
    steps = knowledge.num_steps(observation.num_examples)
    gradient = _mean_gradient(change, theta, steps, knowledge) - force
    return Readout(
        parameters=_named(theta, start),
        gradient=_named(gradient, start),
        force=_named(force, start),
        num_steps=steps,
        num_examples=observation.num_examples,
        findings={
            "change-norm": float(change.norm()),
            "gradient-norm": float(gradient.norm()),
            "force-norm": float(force.norm()),
            "moved-norm": float(moved.norm()),
            "mixture": float(knowledge.training.generator is not None),
        },
    )


def _mean_gradient(change: Tensor, theta: Tensor, steps: int, knowledge: PublicKnowledge) -> Tensor:
    """Return `sum_j w_j (G_j + force)` [m] from the change of a model theta in some steps."""
    kept, weights = sgd_scalars(knowledge.steps, steps)
    return (change + (1 - kept) * theta) / float(weights.sum())


def _followed(observation: Observation, rule: DualRule, key: str) -> tuple[Tensor, Tensor]:
    """Return the model's total change before the round and the force on it in the round, each float64 [m]."""
    moved = torch.zeros(len(observation.reply[key]), dtype=torch.float64)
    client, version = MeanClient(rule=rule, change=moved, total=moved), 0
    for seen in observation.earlier:
        # The multiplier is called for its effect: it updates the accumulated state for missed rounds, as on the client.
        client.multiplier(_array(seen, key, sent=True), seen.round - 1 - version)
        moved = moved + _array(seen, key)
        client.record_change(moved)
        version = seen.round
    received = _array(observation, key, sent=True)
    if rule.realisation == "chain":
        return moved, received
    return moved, client.multiplier(received, observation.round - 1 - version)


def model_after(observation: Observation, knowledge: PublicKnowledge) -> dict[str, Tensor]:
    """Return the client's model at the end of the round, float32 by parameter name: the initial model plus all changes.

    Raises:
        ValueError: If the clients have no dual variables.
    """
    key, start = _KEYS[_rule(knowledge).realisation], _start(knowledge)
    changes = torch.stack([_array(seen, key) for seen in (*observation.earlier, observation)])
    return _named(_vector(start) + changes.sum(dim=0), start)


def _rule(knowledge: PublicKnowledge) -> DualRule:
    if knowledge.training.dual is None:
        raise ValueError("this attack follows the models of clients with dual variables, but these clients have none")
    return knowledge.training.dual.rule


def _start(knowledge: PublicKnowledge) -> dict[str, Tensor]:
    target = build_target(knowledge.target, knowledge.input_shape, knowledge.num_classes)
    return ordinary_parameters(target, torch_generator(knowledge.seed, "model"))


def _vector(values: dict[str, Tensor]) -> Tensor:
    return torch.cat([value.flatten() for value in values.values()]).double()


def _named(vector: Tensor, like: dict[str, Tensor]) -> dict[str, Tensor]:
    parts = torch.split(vector.float(), [value.numel() for value in like.values()])
    return {name: part.view(value.shape) for (name, value), part in zip(like.items(), parts, strict=True)}


def _array(observation: Observation, key: str, *, sent: bool = False) -> Tensor:
    arrays = observation.received if sent else observation.reply
    return torch.from_numpy(np.asarray(arrays[key], dtype=np.float64))
