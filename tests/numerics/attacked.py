"""Clients to attack: real local rounds, and what a server observes of them."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from hyperfl_flwr.attacks.knowledge import PublicImages, PublicKnowledge
from hyperfl_flwr.core.rng import torch_generator
from hyperfl_flwr.core.setting_types import Initialisation
from hyperfl_flwr.methods import METHODS
from hyperfl_flwr.models.encoder import build_encoder
from hyperfl_flwr.models.hypernetwork import Hypernetwork, initial_embedding, initial_hypernetwork
from hyperfl_flwr.models.initialisation import ordinary_parameters, rectifier_parameters
from hyperfl_flwr.models.targets import build_target
from hyperfl_flwr.runs.observation import Observation
from hyperfl_flwr.training.encoder import train_encoder
from hyperfl_flwr.training.fedrep import FedRepRates, train_fedrep
from hyperfl_flwr.training.hyperfl import HyperFLModel, HyperFLRates, train_hyperfl
from hyperfl_flwr.training.local_sgd import Epochs, ParameterSet, train_epochs
from hyperfl_flwr.training.public_training import EncoderForm, HypernetworkForm, LocalSteps, PublicTraining

MEAN, STD = 0.3, 0.4
RATE = 0.01
ENCODER_RATE = 0.02


@dataclass
class Samples:
    """Training data without augmentation."""

    train_images: Tensor
    train_labels: Tensor
    augmentation = None
    train_weights = None


def digits(num: int, side: int = 8, first: int = 0) -> tuple[Tensor, Tensor]:
    """Return handwritten digits [num, 1, side, side] in [0, 1], enlarged bilinearly, and their labels."""
    images, labels = load_digits(return_X_y=True)
    pixels = torch.tensor(images[first : first + num] / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    if side != 8:
        pixels = nn.functional.interpolate(pixels, (side, side), mode="bilinear")
    return pixels, torch.tensor(labels[first : first + num], dtype=torch.int64)


def public_digits(side: int = 8) -> PublicImages:
    """Return digits of which `digits(1000)` has none, for a malicious server."""
    images, labels = digits(600, side, first=1000)
    return PublicImages(images=images.numpy(), labels=labels.numpy())


def samples(images: Tensor, labels: Tensor) -> Samples:
    return Samples((images - MEAN) / STD, labels)


def arrays_of(module: nn.Module, group: str) -> dict[str, np.ndarray]:
    return {f"{group}/{name}": value.detach().numpy().copy() for name, value in module.named_parameters()}


def knowledge_of(
    method: str,
    data: Samples,
    epochs: Epochs,
    *,
    clip: float = 0.0,
    pull: float = 0.0,
    frozen: bool = False,
    target: str = "cnn",
):
    steps = LocalSteps(**vars(epochs), learning_rate=RATE, clip_norm=clip, pull=pull)
    form = HypernetworkForm(
        embedding_dim=64, hidden_width=128, initialisation="hyperfan-bias", embedding_frozen=frozen
    )  # fmt: skip
    return PublicKnowledge(
        target=target, input_shape=tuple(data.train_images.shape[1:]), num_classes=10, mean=(MEAN,), std=(STD,),
        training=PublicTraining(steps=steps, hypernetwork=form), form=METHODS[method].uploads[0].form,
    )  # fmt: skip


def target_for(data: Samples, name: str = "cnn"):
    target = build_target(name, tuple(data.train_images.shape[1:]), 10)
    target.load_state_dict(ordinary_parameters(target, torch_generator(0, "model")), assign=True)
    return target


@dataclass
class Attacked:
    """A client's round, with the secrets that an attack should find."""

    observation: Observation
    knowledge: PublicKnowledge
    secrets: dict[str, Tensor]


def hyperfl(
    data: Samples,
    epochs: Epochs,
    *,
    clip: float = 0.0,
    frozen: bool = False,
    initialisation: Initialisation = "hyperfan-bias",
    bias_shift: float = 0.0,
    hidden_width: int = 128,
    own_embedding: int | None = None,
) -> Attacked:
    """Run HyperFL's round, hypernetwork 64 -> 128 -> theta.

    `bias_shift` is added to the biases of all hidden units; `own_embedding` is the seed of a per-client embedding.
    """
    target, generator = target_for(data), torch_generator(0, "hypernetwork")
    v = initial_embedding(64, initialisation, generator)
    network = Hypernetwork(target.extractor, hidden_width=hidden_width)
    network.load_state_dict(
        initial_hypernetwork(network, target.extractor, initialisation, v, generator), assign=True
    )  # fmt: skip
    if own_embedding is not None:
        v = initial_embedding(64, initialisation, torch_generator(own_embedding, "own"))
    with torch.no_grad():
        network.hidden.bias += bias_shift
        secrets = {"v": v.clone(), "z": network.activation(v), "theta": network(v)}
    model = HyperFLModel(
        extractor=target.extractor, classifier=target.classifier, hypernetwork=network,
        embedding=nn.Parameter(v.clone()), frozen=frozen,
    )  # fmt: skip
    before = arrays_of(network, "hypernetwork")
    rates = HyperFLRates(classifier=0.1, hypernetwork=RATE, embedding=RATE, clip_norm=clip)
    train_hyperfl(model, data, epochs, rates, np.random.default_rng(0))
    observation = Observation(
        received=before, reply=arrays_of(network, "hypernetwork"), num_examples=len(data.train_labels)
    )
    return Attacked(observation, knowledge_of("hyperfl", data, epochs, clip=clip, frozen=frozen), secrets)


def fedavg(
    data: Samples,
    epochs: Epochs,
    *,
    method: str = "fedavg",
    clip: float = 0.0,
    pull: float = 0.0,
    target: str = "cnn",
) -> Attacked:
    """Run a round of FedAvg or FedProx, or of a method such as pFedHN that replies with the model's change."""
    network = target_for(data, target)
    before = arrays_of(network, "model")
    parameters = list(network.parameters())
    anchor = [parameter.detach().clone() for parameter in parameters]
    everything = ParameterSet(parameters=parameters, learning_rate=RATE, clip_norm=clip, pull=pull, anchor=anchor)
    train_epochs(network, [everything], data, epochs, np.random.default_rng(0))
    after = arrays_of(network, "model")
    changes = METHODS[method].uploads[0].form == "decrease"
    reply = {key: before[key] - after[key] for key in before} if changes else after
    observation = Observation(received=before, reply=reply, num_examples=len(data.train_labels))
    return Attacked(observation, knowledge_of(method, data, epochs, clip=clip, pull=pull, target=target), {})


def it_pfl(data: Samples, epochs: Epochs, *, clip: float = 0.0) -> Attacked:
    """Run IT-PFL-HN's round: pFedHN's, and one step of an encoder on all samples towards an embedding."""
    attacked = fedavg(data, epochs, method="it-pfl", clip=clip)
    encoder = build_encoder("cnn", tuple(data.train_images.shape[1:]), 4, "mean")
    encoder.load_state_dict(rectifier_parameters(encoder, torch_generator(0, "encoder")), assign=True)
    embedding = torch.randn(4, generator=torch_generator(0, "embedding"))
    before = arrays_of(encoder, "encoder")
    whole = Epochs(epochs=1, steps=1, batch_size=500, momentum=epochs.momentum, weight_decay=epochs.weight_decay)
    train_encoder(encoder, embedding, data, whole, np.random.default_rng(0), learning_rate=ENCODER_RATE)
    sent = {**before, "embedding/weight": embedding[None].numpy()}
    came = {**arrays_of(encoder, "encoder"), "embedding/weight": np.zeros((1, 4), np.float32)}
    observation = replace(
        attacked.observation,
        received={**sent, **attacked.observation.received},
        reply={**came, **attacked.observation.reply},
    )
    form = EncoderForm(pooling="mean", steps=LocalSteps(**vars(whole), learning_rate=ENCODER_RATE))
    known = replace(attacked.knowledge, training=replace(attacked.knowledge.training, encoder=form))
    return replace(attacked, observation=observation, knowledge=known)


def fedrep(data: Samples, epochs: Epochs) -> Attacked:
    """Run FedRep's round; the server sees the extractor."""
    target = target_for(data)
    before = arrays_of(target.extractor, "extractor")
    rates = FedRepRates(classifier=0.1, extractor=RATE)
    train_fedrep(target.extractor, target.classifier, data, epochs, rates, np.random.default_rng(0))
    observation = Observation(
        received=before, reply=arrays_of(target.extractor, "extractor"), num_examples=len(data.train_labels)
    )
    return Attacked(observation, knowledge_of("fedrep", data, epochs), {})


def pfedhn_pc(data: Samples, epochs: Epochs, *, clip: float = 0.0) -> Attacked:
    """Run pFedHN-PC's round: both parts are trained jointly, and the extractor's change is sent."""
    target = target_for(data)
    before = arrays_of(target.extractor, "extractor")
    everything = ParameterSet(parameters=list(target.parameters()), learning_rate=RATE, clip_norm=clip)
    train_epochs(target, [everything], data, epochs, np.random.default_rng(0))
    after = arrays_of(target.extractor, "extractor")
    reply = {key: before[key] - after[key] for key in before}
    observation = Observation(received=before, reply=reply, num_examples=len(data.train_labels))
    return Attacked(observation, knowledge_of("pfedhn-pc", data, epochs, clip=clip), {})


def relative_error(value: Tensor, expected: Tensor) -> float:
    return float((value.double() - expected.double()).norm() / expected.double().norm())
