"""pFedHN's clients against a written-out optimiser: what they train, send and keep."""

import numpy as np
import pytest
import torch
from plain import CLASSIFIER, Sgd, cross_entropy, digits_cnn, leaves, random_samples

from clients.engine.context import ClientContext
from clients.pfedhn import PFedHNClient, PFedHNPCClient
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.config.table import default_settings
from hyperfl_flwr.core.rng import torch_generator
from hyperfl_flwr.data.federated_data import ClientData
from hyperfl_flwr.models.initialisation import ordinary_parameters
from hyperfl_flwr.models.targets import build_target
from hyperfl_flwr.node.private_state import PrivateState

NUM, BATCH = 13, 5


def fit(client_class, tmp_path, **changes):
    """Return (received, private before, reply, private after, data) of one round in float32."""
    samples = random_samples(NUM, (1, 8, 8), 10)
    samples.train_images = samples.train_images.float()
    data = ClientData(
        train_images=samples.train_images, train_labels=samples.train_labels,
        test_images=samples.train_images, test_labels=samples.train_labels,
        augmentation=samples.augmentation, num_classes=10,
    )  # fmt: skip
    base = {
        "method": "pfedhn",
        "batch-size": BATCH,
        "local-epochs": 2,
        "momentum": 0.5,
        "weight-decay": 0.03,
        "learning-rate": 0.05,
    }
    config = RunConfig.from_flat(default_settings() | base | changes)
    state = PrivateState(tmp_path, "experiment", 0)
    client = client_class(ClientContext(config=config, client=0, data=data, device=torch.device("cpu"), state=state))
    values = ordinary_parameters(build_target("cnn", (1, 8, 8), 10), torch_generator(5, "model"))
    received = {
        key: values[key.partition("/")[2] if key.startswith("model/") else f"extractor.{key.partition('/')[2]}"]
        for key in client.keys()  # noqa: SIM118 - a client is not a dict
    }
    before = {f"classifier.{name}": value for name, value in client.initial_private().get("classifier", {}).items()}
    arrays, num_examples, _ = client.fit(
        [value.numpy().copy() for value in received.values()], {"round": 1, "version": 0, "kept-version": 0}
    )
    assert num_examples == NUM
    after = {key.replace("/", "."): torch.tensor(value) for key, value in state.load(1).items()} if before else {}
    reply = {key: torch.from_numpy(array) for key, array in zip(received, arrays, strict=True)}
    return received, before, reply, after, samples


def short(key):
    """Return a message key in the reference's naming."""
    return key.partition("/")[2].removeprefix("extractor.")


def reference(values, samples, clip):
    names = list(values)
    optimiser = Sgd(0.05, 0.5, 0.03, clip)
    for images, labels in samples.batches(samples.seen):
        values = leaves(values, names)
        logits = digits_cnn(images, values) @ values["classifier.weight"].T + values["classifier.bias"]
        values = optimiser.step(values, cross_entropy(logits, labels), names)
    return values


@pytest.mark.parametrize(("local_steps", "steps"), [(0, 6), (4, 4)])
@pytest.mark.parametrize("clip", [50.0, 0.5])
def test_the_reply_is_the_change_of_the_whole_model(tmp_path, local_steps, steps, clip):
    """The reply is theta before minus after two epochs or four steps, with one clip over all layers; float32."""
    changes = {"pfedhn.local-steps": local_steps, "pfedhn.clip-norm": clip}
    received, before, reply, _, samples = fit(PFedHNClient, tmp_path, **changes)
    assert len(samples.seen) == steps
    assert before == {}
    wanted = reference({short(key): value for key, value in received.items()}, samples, clip)
    for key, value in received.items():
        torch.testing.assert_close(reply[key], value - wanted[short(key)], rtol=1e-4, atol=1e-6)
        assert reply[key].abs().max() > 0


def test_a_personal_classifier_is_trained_jointly_and_stays(tmp_path):
    """The reply is the extractor's change; the classifier is trained in the same steps, stored and not sent."""
    received, before, reply, after, samples = fit(PFedHNPCClient, tmp_path, method="pfedhn-pc")
    start = {short(key): value for key, value in received.items()} | before
    wanted = reference(start, samples, 50.0)
    assert {short(key) for key in reply} == set(start) - set(CLASSIFIER)
    for key, value in received.items():
        torch.testing.assert_close(reply[key], value - wanted[short(key)], rtol=1e-4, atol=1e-6)
    for name in CLASSIFIER:
        torch.testing.assert_close(after[name], wanted[name], rtol=1e-4, atol=1e-6)
        assert not np.array_equal(after[name].numpy(), before[name].numpy())
