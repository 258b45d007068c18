"""Forged weights: what a malicious server reads off uploads, against closed forms and against an honest broadcast."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from attacked import MEAN, STD, arrays_of, digits, public_digits, relative_error, samples
from scipy.spatial.distance import cdist
from torch import nn
from torch.func import functional_call

from hyperfl_flwr.attacks.base import AttackSettings
from hyperfl_flwr.attacks.fishing import FISHED, forge_fishing
from hyperfl_flwr.attacks.forging import first_linear, normalised, pass_through, with_values
from hyperfl_flwr.attacks.imprint import forge_imprint
from hyperfl_flwr.attacks.knowledge import PublicKnowledge
from hyperfl_flwr.attacks.optimiser_loop import Optimisation
from hyperfl_flwr.attacks.readout import read_out, target_names
from hyperfl_flwr.attacks.registry import ATTACKS, attacks_on
from hyperfl_flwr.attacks.trap_weights import forge_trap_weights
from hyperfl_flwr.core.rng import torch_generator
from hyperfl_flwr.methods import METHODS
from hyperfl_flwr.models.hypernetwork import Hypernetwork
from hyperfl_flwr.models.initialisation import ordinary_parameters
from hyperfl_flwr.models.targets import build_target
from hyperfl_flwr.runs.observation import Observation, mean_observation
from hyperfl_flwr.training.fedrep import FedRepRates, train_fedrep
from hyperfl_flwr.training.local_sgd import Epochs, ParameterSet, train_epochs
from hyperfl_flwr.training.public_training import LocalSteps, PublicTraining

RATE = 0.01
PUBLIC = public_digits()


def knowledge_of(target="mlp", *, batch=20, epochs=1, shape=(1, 8, 8), private=False):
    steps = LocalSteps(epochs=epochs, batch_size=batch, momentum=0.5, weight_decay=5e-4, learning_rate=RATE)
    return PublicKnowledge(
        target=target, input_shape=shape, num_classes=10, mean=(MEAN,), std=(STD,),
        training=PublicTraining(steps=steps), private_classifier=private,
    )  # fmt: skip


def sent_by(knowledge, group="model"):
    """Return what an honest server sends at first: the model, or the extractor."""
    target = target_of(knowledge)
    return arrays_of(target if group == "model" else target.extractor, group)


def target_of(knowledge):
    target = build_target(knowledge.target, knowledge.input_shape, knowledge.num_classes)
    target.load_state_dict(ordinary_parameters(target, torch_generator(0, "model")), assign=True)
    return target


def observed(knowledge, received, images, labels):
    """Train a client from what it has received, with FedAvg or, if only the extractor is sent, FedRep."""
    target, data = target_of(knowledge), samples(images, labels)
    epochs = Epochs(**{name: getattr(knowledge.steps, name) for name in Epochs.__dataclass_fields__})
    is_whole = all(key.startswith("model/") for key in received)
    network, group = (target, "model") if is_whole else (target.extractor, "extractor")
    values = {key.partition("/")[2]: torch.from_numpy(value.copy()) for key, value in received.items()}
    network.load_state_dict(values, assign=True)
    for parameter in target.parameters():
        parameter.requires_grad_()
    if is_whole:
        whole = ParameterSet(parameters=list(target.parameters()), learning_rate=RATE)
        train_epochs(target, [whole], data, epochs, np.random.default_rng(0))
    else:
        rates = FedRepRates(classifier=0.1, extractor=RATE)
        train_fedrep(target.extractor, target.classifier, data, epochs, rates, np.random.default_rng(0))
    return Observation(received=received, reply=arrays_of(network, group), num_examples=len(images))


def psnr(found, images):
    """Return the PSNR in dB of each image's nearest reconstruction."""
    flat, truth = (np.asarray(each).reshape(len(each), -1) for each in (found, images))
    return -10 * np.log10(cdist(truth, flat, "sqeuclidean").min(axis=1) / truth.shape[1] + 1e-15)


def read(name, observation, knowledge):
    (result,) = ATTACKS[name].run([observation], knowledge, AttackSettings(public_images=PUBLIC.images))
    return result.images


def active(knowledge, received, images):
    """Return which of the layer's rows are active for which images, [m, B]."""
    layer = first_linear(knowledge)
    named = {name: torch.from_numpy(received[key]) for key, name in target_names(received).items()}
    weight, bias = (named[f"{layer.name}.{part}"] for part in ("weight", "bias"))
    inputs = normalised(images.numpy(), knowledge).flatten(1)
    return weight.double() @ inputs.double().T + bias.double()[:, None] > 0


@pytest.mark.parametrize("group", ["model", "extractor"])
def test_images_that_are_alone_in_a_bin_are_read_exactly(group):
    """Two images are in one bin if the same rows are active for both."""
    knowledge = knowledge_of(private=group == "extractor")
    images, labels = digits(20)
    received = forge_imprint(sent_by(knowledge, group), knowledge, PUBLIC, 20)
    rows = active(knowledge, received, images)
    alone = (rows[:, :, None] == rows[:, None]).all(dim=0).sum(dim=1).numpy() == 1
    assert 8 < alone.sum() < 20
    found = psnr(read("imprint", observed(knowledge, received, images, labels), knowledge), images)
    assert found[alone].min() > 25
    assert np.median(found[alone]) > 50
    assert found[~alone].max() < 20


@pytest.mark.parametrize("group", ["model", "extractor"])
def test_an_image_that_activates_a_row_alone_is_read_exactly(group):
    knowledge = knowledge_of(private=group == "extractor")
    images, labels = digits(20)
    received = forge_trap_weights(sent_by(knowledge, group), knowledge, PUBLIC, 20)
    rows = active(knowledge, received, images)
    alone = rows[rows.sum(dim=1) == 1].any(dim=0).numpy()
    assert alone.sum() > 10
    found = psnr(read("trap-weights", observed(knowledge, received, images, labels), knowledge), images)
    assert found[alone].min() > 45


@pytest.mark.parametrize("name", ["imprint", "trap-weights"])
def test_neither_an_honest_broadcast_nor_another_client_shows_the_images(name):
    """Of 120 images in one step, the same reading finds none without the forged weights, nor in another's upload."""
    knowledge = knowledge_of(batch=120)
    images, labels = digits(120)
    received = ATTACKS[name].forge(sent_by(knowledge), knowledge, PUBLIC, 120)
    replies = {
        "forged": observed(knowledge, received, images, labels),
        "honest": observed(knowledge, sent_by(knowledge), images, labels),
        "other": observed(knowledge, received, *digits(120, first=300)),
    }
    found = {each: (psnr(read(name, reply, knowledge), images) > 30).sum() for each, reply in replies.items()}
    assert found["forged"] > 35
    assert (found["honest"], found["other"]) == (0, 0)


def test_few_images_need_no_forged_weights_in_a_perceptron():
    """Honest rows, too, are active for single images of a small batch (Boenisch et al.)."""
    knowledge = knowledge_of()
    images, labels = digits(20)
    found = psnr(read("trap-weights", observed(knowledge, sent_by(knowledge), images, labels), knowledge), images)
    assert 5 < (found > 40).sum() < 15


@pytest.mark.parametrize("name", ["imprint", "trap-weights"])
def test_the_sum_of_two_clients_is_read_like_one_batch(name):
    """Of two clients with 15 images each, most are read off the mean of their uploads."""
    alone = knowledge_of(batch=15)
    known = replace(alone, summed_clients=2)
    received = ATTACKS[name].forge(sent_by(alone), known, PUBLIC, 30)
    images, labels = digits(30)
    parts = [observed(alone, received, images[rows], labels[rows]) for rows in (slice(15), slice(15, 30))]
    assert (psnr(read(name, mean_observation(parts), known), images) > 40).sum() > 15


@pytest.mark.parametrize("name", ["imprint", "trap-weights"])
def test_many_steps_leave_most_of_what_one_step_shows(name):
    """Six steps on 40 images, each of which is used twice, move the rows by little."""
    knowledge = knowledge_of(batch=14, epochs=2)
    received = ATTACKS[name].forge(sent_by(knowledge), knowledge, PUBLIC, 40)
    images, labels = digits(40)
    found = psnr(read(name, observed(knowledge, received, images, labels), knowledge), images)
    assert (found > 30).sum() > 13


def test_a_client_that_is_sampled_again_and_again_loses_more_images():
    """Of 60 images, four rounds with other trap weights each show twice as many as one round."""
    images, labels = digits(60)
    found = []
    for seed in range(4):
        knowledge = replace(knowledge_of(batch=60), seed=seed)
        received = forge_trap_weights(sent_by(knowledge), knowledge, PUBLIC, 60)
        reply = observed(knowledge, received, images, labels)
        found.append(psnr(read("trap-weights", reply, knowledge), images) > 30)
    assert max(each.sum() for each in found) < 50
    assert np.any(found, axis=0).sum() > max(each.sum() for each in found) + 8


@pytest.mark.parametrize(("target", "shape"), [("cnn", (1, 28, 28)), ("lenet", (1, 28, 28)), ("cnn", (3, 32, 32))])
def test_the_forged_convolutions_keep_their_outputs_positive(target, shape):
    """Then no rectifier changes anything, and what reaches the layer is the pooled image."""
    knowledge = replace(knowledge_of(target, shape=(1, 28, 28)), input_shape=shape, mean=(MEAN,) * shape[0],
                        std=(STD,) * shape[0])  # fmt: skip
    layer = first_linear(knowledge)
    images = torch.randn(20, *shape, generator=torch.Generator().manual_seed(0))
    values = pass_through(layer, images)
    outputs, smallest = images, []
    for name, below in layer.below.named_children():
        own = {part: values[f"extractor.{name}.{part}"] for part, _ in below.named_parameters()}
        outputs = functional_call(below, own, (outputs,))
        smallest += [float(outputs.min())] if own else []
    assert len(smallest) >= 2
    assert min(smallest) > -1e-5
    torch.testing.assert_close(outputs, layer.inputs(values, images))


def test_images_are_read_through_convolutions():
    """The decoder knows the pooling from public images: one batch of digits at 16x16 in FedAvg's cnn."""
    public, (images, labels) = public_digits(16), digits(20, side=16)
    knowledge = knowledge_of("cnn", shape=(1, 16, 16))
    received = forge_imprint(sent_by(knowledge), knowledge, public, 20)
    settings = AttackSettings(public_images=public.images)
    (result,) = ATTACKS["imprint"].run([observed(knowledge, received, images, labels)], knowledge, settings)
    another = observed(knowledge, received, *digits(20, side=16, first=300))
    (other,) = ATTACKS["imprint"].run([another], knowledge, settings)
    assert (psnr(result.images, images) > 20).sum() > 8
    assert (psnr(other.images, images) > 20).sum() == 0


def test_a_forged_hypernetwork_generates_the_trap_for_every_embedding():
    """The weights theta are the head biases for each v, bit for bit, and a step changes nothing else."""
    knowledge = knowledge_of(private=True)
    extractor = target_of(knowledge).extractor
    network = Hypernetwork(extractor, embedding_dim=6, hidden_width=5)
    for parameter in network.state_dict():
        shape = network.get_parameter(parameter).shape
        owner = network.hidden if parameter.startswith("hidden.") else network
        setattr(owner, parameter.rpartition(".")[2], nn.Parameter(torch.randn(shape)))
    sent = arrays_of(network, "hypernetwork")
    forged = forge_imprint(sent, knowledge, PUBLIC, 20)
    assert [(key, v.shape, v.dtype) for key, v in forged.items()] == [(k, v.shape, v.dtype) for k, v in sent.items()]
    plain = forge_imprint(sent_by(knowledge, "extractor"), knowledge, PUBLIC, 20)
    network.load_state_dict({key.partition("/")[2]: torch.from_numpy(value) for key, value in forged.items()})
    layer = first_linear(knowledge)
    for scale in (0.0, 1.0, 1e3):
        theta = network(scale * torch.randn(6))
        torch.testing.assert_close(theta, network.head_bias, rtol=0, atol=0)
        own = network.split(theta)
        for part in ("weight", "bias"):
            name = f"{layer.name.partition('.')[2]}.{part}"
            np.testing.assert_array_equal(own[name].detach().numpy(), plain[f"extractor/{name}"])
    network(torch.randn(6)).square().sum().backward()
    assert not network.head_weight.grad.any()
    assert not network.hidden.weight.grad.any()


def test_a_dead_layer_for_all_others_leaves_one_client_in_a_sum():
    """Different models for different clients (Pasquini et al., CCS 2022): where nothing binds a sum to one model."""
    knowledge = knowledge_of()
    layer, received = first_linear(knowledge), sent_by(knowledge)
    steps = replace(knowledge.steps, momentum=0.0, weight_decay=0.0)
    dead = {f"{layer.name}.weight": torch.zeros(200, 64), f"{layer.name}.bias": torch.full((200,), -1.0)}
    images, labels = digits(20)
    reply = observed(knowledge.with_steps(steps), with_values(received, dead, knowledge), images, labels).reply
    for part in ("weight", "bias"):
        np.testing.assert_array_equal(reply[f"model/{layer.name}.{part}"], dead[f"{layer.name}.{part}"].numpy())


@pytest.mark.parametrize("is_forged", [True, False])
def test_fishing_leaves_the_gradient_of_the_only_image_of_the_class(is_forged):
    """Of eight digits one is a zero: the extractor's gradient is an eighth of that of this digit alone."""
    images, labels = digits(8)
    assert labels.tolist().count(FISHED) == 1
    position = labels.tolist().index(FISHED)
    knowledge = knowledge_of("cnn", batch=8)
    received = sent_by(knowledge)
    if is_forged:
        received = forge_fishing(received, knowledge, PUBLIC, 8)
    together = read_out(observed(knowledge, received, images, labels), knowledge).gradient
    one = observed(knowledge, received, images[position : position + 1], labels[position : position + 1])
    alone = read_out(one, knowledge).gradient
    names = [name for name in together if name.startswith("extractor")]
    errors = [relative_error(8 * together[name], alone[name]) for name in names]
    assert max(errors) < 1e-3 if is_forged else min(errors) > 0.5


def test_fishing_finds_the_image():
    """The search has one image to find in a batch of eight; unrelated zeros are farther from it."""
    (images, labels), knowledge = digits(8), knowledge_of("cnn", batch=8)
    received = forge_fishing(sent_by(knowledge), knowledge, PUBLIC, 8)
    settings = AttackSettings(optimisation=Optimisation(iterations=200, learning_rate=1.0, signed=True))
    (result,) = ATTACKS["fishing"].run([observed(knowledge, received, images, labels)], knowledge, settings)
    caught, others = images[labels == FISHED], digits(600, first=1000)
    assert psnr(result.images, caught).min() > psnr(others[0][others[1] == FISHED], caught).max() + 3


def test_what_cannot_be_forged_is_refused():
    with pytest.raises(ValueError, match="without normalisation layers"):
        ATTACKS["trap-weights"].check(knowledge_of("resnet18"))
    with pytest.raises(ValueError, match="private classifier"):
        ATTACKS["imprint"].check(knowledge_of("cnn", private=True))
    ATTACKS["trap-weights"].check(knowledge_of("cnn", private=True))
    ATTACKS["imprint"].check(knowledge_of("mlp", private=True))
    knowledge = knowledge_of()
    with pytest.raises(ValueError, match="keeps it private"):
        forge_fishing(sent_by(knowledge, "extractor"), knowledge, PUBLIC, 8)
    images, labels = digits(2)
    with pytest.raises(ValueError, match="need public images"):
        ATTACKS["imprint"].run([observed(knowledge, sent_by(knowledge), images, labels)], knowledge, AttackSettings())


def test_the_table_matches_what_the_server_sends():
    """What the server sends is forged, to all clients or to each its own; honest attacks are not among these."""
    generating, silent = ("pfedhn", "pfedhn-pc", "it-pfl"), ("local", "priv-hfl", "fedakd")
    for name in ("fedavg", "fedrep", "hyperfl", "hyperfl-frozen", *generating, *silent):
        uploads = METHODS[name].uploads
        single, summed = (attacks_on(uploads, summed=way, malicious_server=True)[:2] for way in (False, True))
        assert single == ([] if name in silent else ["imprint", "trap-weights"])
        assert summed == ([] if name in silent + generating else ["imprint", "trap-weights"])
    assert "imprint" not in attacks_on(METHODS["fedavg"].uploads)
