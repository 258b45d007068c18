"""PPSGD: the additive model, its steps, and its groups."""

import math

import numpy as np
import pytest
import torch
from members import FULL_BATCH, client, initial_arrays, initial_model, upload_after
from torch.nn import functional

from clients.fedavg import FedAvgClient
from clients.ppsgd import PPSGDClient
from hyperfl_flwr.node.private_state import PrivateState

CHANGES = FULL_BATCH | {"ppsgd.classifier-learning-rate": 0.3}


@pytest.mark.parametrize("target", ["mlp", "cnn", "own_networks:with_batchnorm"])
def test_a_round_is_sgd_on_the_additive_model(target, tmp_path):
    """Two rounds of full-batch steps: both classifiers take the common gradient, each at its rate and with decay."""
    member = client(PPSGDClient, tmp_path, CHANGES, target)
    found = upload_after(member, 2)
    reference = client(FedAvgClient, tmp_path, CHANGES, target)
    model, data = reference.model, reference.context.data
    model.load_state_dict(initial_model(reference), assign=True)
    model.train()
    own = [torch.zeros_like(parameter, requires_grad=True) for parameter in model.classifier.parameters()]
    for _ in range(2):
        optimiser = torch.optim.SGD(
            [{"params": list(model.parameters()), "lr": 0.1}, {"params": own, "lr": 0.3}],
            momentum=0.5, weight_decay=0.02,
        )  # fmt: skip
        for _ in range(4):
            optimiser.zero_grad()
            features = model.extractor(data.train_images)
            summed = [common + mine for common, mine in zip(model.classifier.parameters(), own, strict=True)]
            functional.cross_entropy(functional.linear(features, *summed), data.train_labels).backward()
            optimiser.step()
    for name, value in model.state_dict().items():
        np.testing.assert_allclose(found[name], value.detach().numpy(), rtol=0, atol=5e-6, err_msg=name)
    stored = PrivateState(tmp_path, "experiment", 0).load(2)
    assert stored.keys() == {f"offset/{name}" for name, _ in model.classifier.named_parameters()}
    for value, expected in zip(stored.values(), own, strict=True):
        np.testing.assert_allclose(value, expected.detach().numpy(), rtol=0, atol=5e-6)
    assert max(float(each.detach().norm()) for each in own) > 0.01


def test_the_client_uses_the_sum_of_both_classifiers(tmp_path):
    """The exported model, one linear classifier, gives the logits of the two."""
    member = client(PPSGDClient, tmp_path, CHANGES, "mlp")
    upload_after(member)
    images = member.context.data.test_images
    with torch.no_grad():
        logits = member.predictor()(images)
        features = member.model.extractor(images)
        shared = member.model.classifier(features)
        alone = client(FedAvgClient, tmp_path, CHANGES, "mlp").model
        alone.load_state_dict(dict(member.target_state()), assign=True)
        torch.testing.assert_close(alone(images), logits)
    assert float((logits - shared).abs().max()) > 1e-3


def test_with_a_rate_of_nearly_zero_it_is_fedavg(tmp_path):
    tiny = CHANGES | {"ppsgd.classifier-learning-rate": 1e-30}
    found = upload_after(client(PPSGDClient, tmp_path / "a", tiny, "mlp"))
    expected = upload_after(client(FedAvgClient, tmp_path / "b", CHANGES, "mlp"))
    assert found.keys() == expected.keys()
    for name in found:
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("heads", ["noised", "published"])
def test_with_noise_the_private_classifier_moves_as_the_setting_says(heads, tmp_path):
    """`noised`: along the shared classifier's noisy change, at the ratio of the rates; `published`: along its own.

    Its sum over the 30 samples, too, is divided by the batch size of the settings.
    """
    changes = {
        "batch-size": 60,
        "local-epochs": 1,
        "ppsgd.classifier-learning-rate": 0.3,
        "dp.epsilon": 5.0,
        "num-rounds": 1,
    }
    changes |= {"weight-decay": 0.0, "dp.heads": heads}
    member = client(PPSGDClient, tmp_path, changes, "mlp")
    before = initial_arrays(member)
    found = upload_after(member)
    moved = torch.cat(
        [torch.from_numpy(found[f"classifier.{n}"] - before[f"classifier.{n}"]).flatten() for n in ("weight", "bias")]
    )
    own = torch.cat([value.detach().flatten() for value in member.network.offset.parameters()])
    data, model = member.context.data, client(FedAvgClient, tmp_path, CHANGES, "mlp").model
    model.load_state_dict(initial_model(member), assign=True)
    loss = functional.cross_entropy(model(data.train_images), data.train_labels)
    gradients = torch.autograd.grad(loss, list(model.classifier.parameters()))
    plain = -0.3 * (30 / 60) * torch.cat([gradient.flatten() for gradient in gradients])
    if heads == "noised":
        torch.testing.assert_close(own, 3 * moved, rtol=1e-4, atol=1e-6)
        assert float((own - plain).norm()) > 0.1 * float(plain.norm())
    else:
        torch.testing.assert_close(own, plain, rtol=1e-4, atol=1e-6)
    assert math.isfinite(float(own.norm()))
