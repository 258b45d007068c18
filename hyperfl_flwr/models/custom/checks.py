"""Check a user-supplied network before a run starts: it must be splittable, shareable and reproducible."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call

from hyperfl_flwr.core.packages.package_finder import where
from hyperfl_flwr.models.custom.network import CustomTarget, Factory, build_custom, new_target
from hyperfl_flwr.models.layers.dropout import seed_dropout

BATCH = 3
"""Number of random samples in a check."""

TOLERANCE = 1e-4
"""Largest difference of logits that counts as rounding error, relative to the largest logit or to 1, if larger."""


def check_custom(name: str, input_shape: tuple[int, ...], num_classes: int) -> None:
    """Check a user-supplied network with random samples.

    Args:
        name: Name of the factory, `package.module:factory`.
        input_shape: Shape of a sample.
        num_classes: Number of classes K.

    Raises:
        ConfigError: If a check fails; the message names the problem and the remedy.
    """
    factory = Factory(name, input_shape, num_classes)
    target = new_target(factory, 1).eval()
    _check_values(factory, target)
    generator = torch.Generator().manual_seed(0)
    samples = torch.randn(BATCH, *input_shape, generator=generator)
    logits = _logits(factory, target, samples)
    _check_classifier(factory, samples, logits)
    _check_samples_apart(factory, target, samples, logits)
    _check_replaceable(factory, target, samples, logits)
    _check_training(factory, target, samples)


def _check_values(factory: Factory, target: CustomTarget) -> None:
    """Check that the same seed gives the same finite initial values."""
    again = new_target(factory, 1).state_dict()
    for name, value in target.state_dict().items():
        if name not in again or not torch.equal(value, again[name]):
            raise factory.problem(
                f"the factory must give the same values under the same seed of torch, but "
                f"{target.original_name(name)} differs; draw from torch's global generator only"
            )
        if not value.isfinite().all():
            raise factory.problem(f"the initial values of {target.original_name(name)} are not finite")


def _logits(factory: Factory, target: nn.Module, samples: Tensor) -> Tensor:
    """Return the logits of samples, and check that the network does not modify the samples."""
    given = samples.clone()
    with torch.no_grad():
        logits = _called(factory, target, given)
    expected = (len(samples), factory.num_classes)
    if not isinstance(logits, Tensor) or logits.shape != expected or logits.dtype != torch.float32:
        found = f"float32 {list(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
        raise factory.problem(
            f"{len(samples)} samples must give logits, float32 {list(expected)}, but gave {found}; return one "
            f"logit per class"
        )
    if not torch.equal(given, samples):
        raise factory.problem("the network changes its input in place; let its first layer return a new tensor")
    return logits


def _called(factory: Factory, target: nn.Module, samples: Tensor) -> Tensor:
    shape = list(samples.shape)
    try:
        logits: Tensor = target(samples)
    except Exception as error:
        raise factory.problem(f"the network cannot take samples {shape}: {where(error)}") from error
    return logits


def _check_classifier(factory: Factory, samples: Tensor, logits: Tensor) -> None:
    """Check that the network ends with its classifier, so that the split network computes the same logits."""
    network = factory.call(1).eval()
    with torch.no_grad():
        whole = _called(factory, network, samples.clone())
    if not isinstance(whole, Tensor) or not _close(whole, logits):
        raise factory.problem(
            "the network must end with its classifier and return the logits: nothing may follow that layer (no "
            "softmax), and nothing else may use it"
        )


def _check_samples_apart(factory: Factory, target: CustomTarget, samples: Tensor, logits: Tensor) -> None:
    if not _close(_logits(factory, target, samples[:-1]), logits[:-1]):
        raise factory.problem(
            "in evaluation, a sample's logits must not depend on the other samples of its batch; BatchNorm needs "
            "track_running_stats=True"
        )


def _check_replaceable(factory: Factory, target: CustomTarget, samples: Tensor, logits: Tensor) -> None:
    """Check that the network computes with replaced weights, as a hypernetwork requires."""
    # Its parameters are on the meta device: a network that uses them instead of the replacements gives meta logits.
    empty = build_custom(factory.name, factory.input_shape, factory.num_classes).eval()
    values = {name: value.detach() for name, value in target.state_dict().items()}
    advice = "read parameters from the layers in each call and keep no other references to them"
    try:
        with torch.no_grad():
            replaced = functional_call(empty, values, (samples.clone(),))
    except Exception as error:
        raise factory.problem(f"the weights cannot be replaced in a call; {advice}: {where(error)}") from error
    if replaced.is_meta or not _close(replaced, logits):
        raise factory.problem(f"the network does not use the weights that are passed in a call; {advice}")


def _check_training(factory: Factory, target: CustomTarget, samples: Tensor) -> None:
    """Check that training draws random numbers in dropout layers only, and changes no constant buffer."""
    constants = {name: value.clone() for name, value in _constants(target).items()}
    target.train()
    # The seeds of torch differ and the seed of our dropout does not: any difference is randomness that no run repeats.
    results = [_trained(factory, target, samples, seed) for seed in (1, 2)]
    if not _close(*results):
        raise factory.problem(
            "training draws random numbers that do not follow from the run's seed; use torch.nn.Dropout, Dropout1d, "
            "Dropout2d or Dropout3d as a layer, not torch.nn.functional.dropout or another layer's dropout argument"
        )
    for name, value in _constants(target).items():
        if not torch.equal(value, constants[name]):
            raise factory.problem(
                f"the buffer {target.original_name(name)} changes in training; only BatchNorm's running statistics "
                f"may, so keep other buffers constant"
            )


def _trained(factory: Factory, target: CustomTarget, samples: Tensor, seed: int) -> Tensor:
    """Return the logits in training mode under a seed of torch, with a fixed seed of our dropout."""
    seed_dropout([target], torch.Generator().manual_seed(0))
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        logits = _called(factory, target, samples.clone())
    try:
        torch.autograd.grad(logits.square().sum(), list(target.parameters()), allow_unused=True)
    except RuntimeError as error:
        raise factory.problem(f"no gradient reaches its parameters: {error}") from error
    return logits.detach()


def _constants(target: CustomTarget) -> Mapping[str, Tensor]:
    kept = target.state_dict()
    return {name: value for name, value in target.named_buffers() if name not in kept}


def _close(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    return bool((one - other).abs().max() <= TOLERANCE * max(1.0, float(other.abs().max())))
