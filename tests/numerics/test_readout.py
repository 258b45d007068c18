"""What a server reads off one reply, compared with the client's secrets and with autograd."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from attacked import RATE, digits, fedavg, fedrep, hyperfl, it_pfl, pfedhn_pc, relative_error, samples, target_for
from torch import nn
from torch.func import functional_call
from torch.nn import functional

from hyperfl_flwr.attacks.encoder_gradient import encoder_arrays, read_encoder
from hyperfl_flwr.attacks.readout import mean_gradients, read_heads, read_out, refine_embedding, sgd_scalars
from hyperfl_flwr.core.rng import torch_generator
from hyperfl_flwr.models.encoder import build_encoder
from hyperfl_flwr.models.hypernetwork import Hypernetwork, initial_hypernetwork
from hyperfl_flwr.runs.observation import Observation
from hyperfl_flwr.training.local_sgd import Epochs
from hyperfl_flwr.training.public_training import LocalSteps

ONE_STEP = Epochs(epochs=1, batch_size=8)


def flat(tensors):
    return torch.cat([value.flatten() for value in tensors.values()])


def extractor_gradient(data, theta, weight_decay=0.0):
    """Return the autograd gradient [P] at theta with the classifier after step 1 (one step of SGD)."""
    target = target_for(data)
    shapes = {name: parameter.shape for name, parameter in target.extractor.named_parameters()}
    parts = torch.split(theta, [shape.numel() for shape in shapes.values()])
    values = {n: p.view(s).clone().requires_grad_() for (n, s), p in zip(shapes.items(), parts, strict=True)}
    features = functional_call(target.extractor, values, (data.train_images,))
    optimiser = torch.optim.SGD(target.classifier.parameters(), lr=0.1, weight_decay=weight_decay)
    functional.cross_entropy(target.classifier(features.detach()), data.train_labels).backward()
    optimiser.step()
    loss = functional.cross_entropy(target.classifier(features), data.train_labels)
    return torch.cat([gradient.flatten() for gradient in torch.autograd.grad(loss, list(values.values()))])


@pytest.mark.parametrize(
    ("num", "settings", "clip", "initialisation"),
    [
        (1, {}, 0.0, "hyperfan-bias"),
        (1, {"momentum": 0.5, "weight_decay": 5e-4}, 1.0, "hyperfan-bias"),
        (8, {"momentum": 0.5, "weight_decay": 5e-4}, 0.0, "hyperfan-bias"),
        (8, {"momentum": 0.5, "weight_decay": 5e-4}, 50.0, "torch"),
    ],
)
def test_embedding_activation_and_weights_are_read_off_one_step(num, settings, clip, initialisation):
    """The 28x28 network's z, v and theta are found to 1e-5 from float32 uploads of the project's own training."""
    data = samples(*digits(num, side=28))
    epochs = replace(ONE_STEP, **settings)
    attacked = hyperfl(data, epochs, clip=clip, initialisation=initialisation)
    reading = read_out(attacked.observation, attacked.knowledge)
    assert len(attacked.secrets["theta"]) == 115_776
    assert relative_error(reading.hidden, attacked.secrets["z"]) < 1e-5
    assert relative_error(reading.embedding, attacked.secrets["v"]) < 1e-5
    assert relative_error(flat(reading.parameters), attacked.secrets["theta"]) < 1e-5
    assert reading.findings["rank"] == 1
    if clip == 0.0 and not settings:
        assert relative_error(flat(reading.gradient), extractor_gradient(data, attacked.secrets["theta"])) < 1e-4


def test_a_wrong_learning_rate_changes_the_length_only_and_a_wrong_decay_the_answer():
    """Without weight decay the rate is a factor of every gradient, and z, v and theta are ratios of gradients."""
    attacked = hyperfl(samples(*digits(1, side=28)), replace(ONE_STEP, weight_decay=0.05))
    wrong = read_out(
        attacked.observation, attacked.knowledge.with_steps(replace(attacked.knowledge.steps, weight_decay=0.0))
    )
    assert relative_error(wrong.hidden, attacked.secrets["z"]) > 1e-4
    right = read_out(attacked.observation, attacked.knowledge)
    assert relative_error(right.hidden, attacked.secrets["z"]) < 1e-6
    attacked = hyperfl(samples(*digits(1, side=28)), ONE_STEP)
    right = read_out(attacked.observation, attacked.knowledge)
    wrong = read_out(
        attacked.observation, attacked.knowledge.with_steps(replace(attacked.knowledge.steps, learning_rate=3 * RATE))
    )
    torch.testing.assert_close(wrong.hidden, right.hidden, rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(3 * flat(wrong.gradient), flat(right.gradient), rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize(("num", "batch", "limit"), [(1, 1, 2e-4), (8, 8, 2e-3), (40, 8, 2e-3)])
def test_weights_are_read_off_five_epochs(num, batch, limit):
    """Measured errors are 4e-5, 7e-4 and 1e-3 after 5, 5 and 25 steps; the broadcast head bias alone is 1e-1 away."""
    setting = Epochs(epochs=5, batch_size=batch, momentum=0.5, weight_decay=5e-4)
    attacked = hyperfl(samples(*digits(num, side=28)), setting, clip=50.0)
    reading = read_out(attacked.observation, attacked.knowledge)
    assert relative_error(flat(reading.parameters), attacked.secrets["theta"]) < limit


def test_a_frozen_embedding_is_read_off_any_number_of_steps():
    """As z is constant in the round, D_H = z (sum_j w_j g_j)^T has rank one; 25 steps."""
    setting = Epochs(epochs=5, batch_size=8, momentum=0.5, weight_decay=5e-4)
    attacked = hyperfl(samples(*digits(40, side=28)), setting, frozen=True)
    reading = read_out(attacked.observation, attacked.knowledge)
    assert relative_error(reading.hidden, attacked.secrets["z"]) < 1e-5
    assert relative_error(flat(reading.parameters), attacked.secrets["theta"]) < 1e-5
    assert reading.embedding is None
    assert reading.findings["rank"] == 1


def test_a_dead_hypernetwork_generates_what_was_broadcast():
    """With all hidden units off, z = 0 and theta is the head bias; nothing is divided by zero."""
    attacked = hyperfl(samples(*digits(1, side=12)), ONE_STEP, bias_shift=-100.0)
    assert not attacked.secrets["z"].any()
    reading = read_out(attacked.observation, attacked.knowledge)
    assert reading.embedding is None
    assert float(reading.hidden.norm()) < 1e-6
    torch.testing.assert_close(flat(reading.parameters), attacked.secrets["theta"], rtol=0, atol=1e-6)


def test_no_active_unit_corrects_nothing():
    """With z = 0 up to rounding, z = W1 v + b1 says nothing about v, so the first layer's estimate is kept."""
    embedding = torch.randn(4, generator=torch_generator(0, "dead"))
    start = {"hidden.weight": torch.ones(2, 4), "hidden.bias": torch.ones(2)}
    assert refine_embedding(embedding, torch.tensor([-1e-9, -2e-9]), start) is embedding


def test_a_gradient_below_the_rounding_is_reported():
    """With torch's initialisation and one image, step 1 fits it: only weight decay is left, and `rounding` shows it."""
    data = samples(*digits(1, side=28))
    epochs = replace(ONE_STEP, weight_decay=5e-4)
    gone = hyperfl(data, epochs, clip=50.0, initialisation="torch")
    assert read_out(gone.observation, gone.knowledge).findings["rounding"] > 0.3
    clear = hyperfl(data, epochs, clip=50.0)
    reading = read_out(clear.observation, clear.knowledge)
    assert relative_error(reading.hidden, clear.secrets["z"]) < reading.findings["rounding"] < 1e-2


def test_heads_without_bias_hide_nothing():
    """With theta = z H and one step of SGD, the length of z follows from v, which the first layer reveals."""
    data = samples(*digits(1, side=28))
    target = target_for(data)
    network = Hypernetwork(target.extractor)
    generator = torch_generator(0, "no bias")
    v = torch.randn(64, generator=generator)
    values = initial_hypernetwork(network, target.extractor, "torch", v, generator)
    del values["head_bias"]
    leaves = {name: value.requires_grad_() for name, value in values.items()}
    hidden = torch.relu(leaves["hidden.weight"] @ v + leaves["hidden.bias"])
    theta = hidden @ leaves["head_weight"]
    features = functional_call(target.extractor, network.split(theta), (data.train_images,))
    loss = functional.cross_entropy(target.classifier(features), data.train_labels)
    *gradients, of_theta = torch.autograd.grad(loss, [*leaves.values(), theta])
    sent = {f"hypernetwork/{name}": value.detach().numpy() for name, value in leaves.items()}
    reply = {key: sent[key] - np.float32(RATE) * g.numpy() for key, g in zip(sent, gradients, strict=True)}
    known = hyperfl(data, ONE_STEP).knowledge
    reading = read_out(Observation(received=sent, reply=reply, num_examples=1), known)
    assert relative_error(reading.embedding, v) < 1e-5
    assert relative_error(reading.hidden, hidden.detach()) < 1e-5
    assert relative_error(flat(reading.parameters), theta.detach()) < 1e-5
    assert relative_error(flat(reading.gradient), of_theta) < 1e-4
    change = {key.partition("/")[2]: value for key, value in mean_gradients(
        Observation(received=sent, reply=reply, num_examples=1), known).items()}  # fmt: skip
    with pytest.raises(ValueError, match="length of z"):
        read_heads(change, None)


@pytest.mark.parametrize("pull", [0.0, 0.4])
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_scalars_are_those_of_torch_sgd(steps, pull):
    """X_k = a X_0 + sum_j p_j G_j for given gradients and a pull to X_0 equals torch.optim.SGD; float64."""
    settings = {"momentum": 0.6, "weight_decay": 0.07}
    start, gradients = torch.tensor([1.7], dtype=torch.float64), np.linspace(1.0, -2.0, steps)
    parameter = nn.Parameter(start.clone())
    optimiser = torch.optim.SGD([parameter], lr=0.3, **settings)
    for gradient in gradients:
        parameter.grad = torch.tensor([gradient]) + pull * (parameter.detach() - start)
        optimiser.step()
    settings = {"pull": pull, **settings}
    kept, weights = sgd_scalars(LocalSteps(epochs=1, batch_size=1, learning_rate=0.3, **settings), steps)
    assert float(parameter.detach()) == pytest.approx(kept * 1.7 + weights @ gradients, rel=1e-12)


@pytest.mark.parametrize("method", ["fedavg", "pfedhn"])
def test_the_whole_network_gives_its_gradient(method):
    """One step with decay and momentum gives autograd's gradient, from parameters or from their change."""
    data = samples(*digits(4))
    attacked = fedavg(data, Epochs(epochs=1, batch_size=4, weight_decay=0.01, momentum=0.5), method=method)
    reading = read_out(attacked.observation, attacked.knowledge)
    target = target_for(data)
    functional.cross_entropy(target(data.train_images), data.train_labels).backward()
    for name, parameter in target.named_parameters():
        assert relative_error(reading.gradient[name], parameter.grad) < 1e-4
        torch.testing.assert_close(reading.parameters[name], parameter.detach(), rtol=0, atol=0)


def test_what_else_it_pfl_sends_changes_nothing():
    """The model's change is read as pFedHN's, although encoder and (zero) embedding are in the reply too."""
    data, epochs = samples(*digits(4)), Epochs(epochs=1, batch_size=4, weight_decay=0.01, momentum=0.5)
    attacked, plain = it_pfl(data, epochs), fedavg(data, epochs, method="pfedhn")
    assert any(key.startswith("encoder/") for key in attacked.observation.reply)
    reading, expected = (read_out(each.observation, each.knowledge) for each in (attacked, plain))
    assert set(reading.gradient) == set(expected.gradient)
    for name, value in expected.gradient.items():
        torch.testing.assert_close(reading.gradient[name], value, rtol=0, atol=0)
        torch.testing.assert_close(reading.parameters[name], expected.parameters[name], rtol=0, atol=0)


def test_the_encoder_gives_its_gradient():
    """One step with decay and momentum gives autograd's gradient of |g(D) - e|^2 / d at the sent encoder."""
    data = samples(*digits(4))
    attacked = it_pfl(data, Epochs(epochs=1, batch_size=4, weight_decay=0.01, momentum=0.5))
    encoder = build_encoder("cnn", (1, 8, 8), 4, "mean")
    encoder.load_state_dict(encoder_arrays(attacked.observation.received), assign=True)
    embedding = torch.tensor(attacked.observation.received["embedding/weight"][0])
    (encoder.requires_grad_()(data.train_images) - embedding).square().mean().backward()
    found = read_encoder(attacked.observation, attacked.knowledge.training.encoder.steps)
    for name, parameter in encoder.named_parameters():
        assert relative_error(found[name], parameter.grad) < 1e-3


def test_a_shared_extractor_gives_its_gradient():
    """FedRep's gradient is that after the classifier's own step, pFedHN-PC's that with the initial classifier; 1e-4."""
    data, epochs = samples(*digits(4)), Epochs(epochs=1, batch_size=4, weight_decay=0.01, momentum=0.5)
    target = target_for(data)
    theta = flat(dict(target.extractor.named_parameters())).detach()
    functional.cross_entropy(target(data.train_images), data.train_labels).backward()
    of_pc = torch.cat([parameter.grad.flatten() for parameter in target.extractor.parameters()])
    for attacked, expected in (
        (fedrep(data, epochs), extractor_gradient(data, theta, 0.01)),
        (pfedhn_pc(data, epochs), of_pc),
    ):
        reading = read_out(attacked.observation, attacked.knowledge)
        assert not reading.shares_classifier
        assert relative_error(flat(reading.gradient), expected) < 1e-4
        torch.testing.assert_close(flat(reading.parameters), theta, rtol=0, atol=0)


def test_the_input_of_a_linear_layer_is_read_off():
    """For one image dL/dW[r] / dL/db[r] is the classifier's input, the features, to 1e-5."""
    data = samples(*digits(1))
    attacked = fedavg(data, Epochs(epochs=1, batch_size=1))
    gradient = read_out(attacked.observation, attacked.knowledge).gradient
    weight, bias = gradient["classifier.weight"].double(), gradient["classifier.bias"].double()
    inputs = bias @ weight / bias.square().sum()
    with torch.no_grad():
        features = target_for(data).extractor(data.train_images)[0]
    assert relative_error(inputs, features) < 1e-5


def test_what_cannot_be_read_is_said():
    attacked = fedavg(samples(*digits(1)), Epochs(epochs=1, batch_size=1))
    sent = attacked.observation.received
    with pytest.raises(ValueError, match="learned nothing"):
        read_out(
            Observation(received=sent, reply=sent, num_examples=1),
            attacked.knowledge.with_steps(replace(attacked.knowledge.steps, weight_decay=0.0)),
        )
    strange = {f"generator/{key}": value for key, value in sent.items()}
    other = {key: value + 1 for key, value in strange.items()}
    with pytest.raises(ValueError, match="cannot read the extractor off"):
        read_out(Observation(received=strange, reply=other, num_examples=1), attacked.knowledge)


def test_label_counts_are_no_part_of_the_network():
    """FedGen's and FedFTG's clients send them with the model; the reading of the model is as without them."""
    client = fedavg(samples(*digits(2)), Epochs(epochs=1, batch_size=2, momentum=0.0, weight_decay=0.0))
    counts = {"labels/counts": np.ones(10, np.float32)}
    received, reply = ({**arrays, **counts} for arrays in (client.observation.received, client.observation.reply))
    both = [
        read_out(observation, client.knowledge).gradient
        for observation in (client.observation, replace(client.observation, received=received, reply=reply))
    ]
    assert both[0].keys() == both[1].keys()
    assert all(torch.equal(value, both[1][name]) for name, value in both[0].items())
