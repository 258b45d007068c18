"""FedAKD: logits on public samples, their weighted mean, the digest, and its special cases."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federations import small_settings
from flwr.app import Message, RecordDict
from test_noisy_steps import NOISY, member

from hyperfl_flwr.app.budget import refuse_own_as_public
from hyperfl_flwr.app.client import app
from hyperfl_flwr.app.methods import check_run
from hyperfl_flwr.app.resolved import resolved
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.contract.base import Federate
from hyperfl_flwr.contract.folders import current_private, last_checkpoint, metrics
from hyperfl_flwr.core.errors import ConfigError, RefusalError
from hyperfl_flwr.data.public_samples import mixture, public_samples
from hyperfl_flwr.data.registry import load_dataset
from hyperfl_flwr.metrics.evaluation import evaluate
from hyperfl_flwr.server.in_process_grid import InProcessGrid
from hyperfl_flwr.training.knowledge_exchange import digest, distance, logits_on, nothing, packed, unpacked
from hyperfl_flwr.training.local_sgd import Epochs
from strategies.fedakd import FedAKD

SAMPLES = 30


def own_models(run: Path) -> Any:
    """Return the clients' private models after the last round."""
    return current_private(run)


def losses(run: Path, name: str) -> list[float]:
    return [row[name] for row in metrics(run) if row["kind"] == "client"]


@pytest.mark.parametrize("changes", [{"fedakd.samples": 0}, {"fedakd.samples": SAMPLES, "fedakd.held-back": 0.0}])
def test_nobody_to_learn_from_is_local_training_bit_for_bit(changes: dict[str, Any], federate: Federate) -> None:
    """Without public samples, five clients; with them, a single client, which gets its own logits back to the bit."""
    plan: dict[str, Any] = {"num_rounds": 3, "num_clients": 5 if not changes["fedakd.samples"] else 1, "target": "mlp"}
    one = federate("fedakd", 1, **plan, **changes, **{"learning-rate": 0.1})
    other = federate("local", 1, **plan, **{"learning-rate": 0.1})
    assert own_models(one) == own_models(other) != {}
    assert losses(one, "personalized_loss") == losses(other, "personalized_loss")


def test_with_others_clients_learn_from_the_mean(federate: Federate) -> None:
    """The models differ from those of local training, and the bytes are those of P K + 1 numbers in float64."""
    plan: dict[str, Any] = {"num_rounds": 2, "num_clients": 2, "learning-rate": 0.1, "target": "mlp"}
    run = federate("fedakd", **plan, **{"fedakd.samples": SAMPLES, "fedakd.held-back": 0.0})
    assert own_models(run) != own_models(federate("local", **plan))
    (arrays,) = (last_checkpoint(run)[0].values(),)
    assert [value.nbytes for value in arrays] == [8 * (SAMPLES * 10 + 1)]
    assert [value[-1] for value in arrays] == [1.0]  # both weights


def test_a_secure_sum_gives_the_mean_logits(federate: Federate) -> None:
    """Those of a plain round, up to its fixed-point numbers, of which the range is that of logits."""
    plan: dict[str, Any] = {"num_rounds": 1, "num_clients": 4, "target": "mlp", "fedakd.samples": SAMPLES}
    plain, secure = (
        last_checkpoint(federate("fedakd", 4, **plan, **{"secagg.enabled": enabled}))[0]["knowledge/theta"]
        for enabled in (False, True)
    )
    assert np.abs(plain[:-1] - 10).max() > 0.1
    np.testing.assert_allclose(secure, plain, rtol=0, atol=2e-4)


def test_the_digest_stays_where_the_target_is_its_own_logits() -> None:
    """Gradient and change are 0 to the bit, over three passes of uneven batches; with another target they are not."""
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 9), torch.nn.ReLU(), torch.nn.Linear(9, 4))
    samples = torch.randn(23, 3, 2, 2)
    target, passes = logits_on(network, samples, 10), Epochs(epochs=3, batch_size=10)
    distance(network(samples[:10]), target[:10]).backward()
    assert all(not parameter.grad.any() for parameter in network.parameters())
    before = {name: value.clone() for name, value in network.state_dict().items()}
    digest(network, samples, target, passes, 0.1)
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    goal = target + 1
    far = float(distance(logits_on(network, samples, 10), goal))
    digest(network, samples, goal, Epochs(epochs=30, batch_size=10), 0.05)
    assert float(distance(logits_on(network, samples, 10), goal)) < 0.5 * far


def test_the_mean_of_what_is_sent_is_the_weighted_mean() -> None:
    """To the rounding of float32; a single client's logits come back to the bit, however small its weight."""
    one, two = (torch.randn(40, 10, generator=torch.Generator().manual_seed(number)) for number in (1, 2))
    found = unpacked((packed(one, 0.3) + packed(two, 0.9)) / 2, 40)
    torch.testing.assert_close(found, (0.3 * one + 0.9 * two) / 1.2, rtol=0, atol=1e-6)
    assert torch.equal(unpacked(packed(one, 1 / 3), 40), one)
    assert unpacked((packed(one, 0.0) + packed(two, 0.0)) / 2, 40) is None


@pytest.mark.parametrize(("weight", "known"), [(0.5, True), (1e-3, True), (2e-7, False), (0.0, False), (-8.0, False)])
def test_the_rounding_of_a_secure_sum_is_no_knowledge(
    weight: float, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is divided by a weight that is nearly 0, or below it, means nothing."""
    monkeypatch.setattr(FedAKD, "initial_parameters", lambda _: {"knowledge": {"theta": nothing(2)}})
    mean = np.array([11.0 * weight, 9.0 * weight, weight])
    (sent,) = object.__new__(FedAKD).advance({"knowledge/theta": mean}).values()
    assert sent == pytest.approx([11.0, 9.0, 1.0] if known else nothing(2).numpy())


def test_mixtures_are_public_and_new_in_every_round() -> None:
    samples = public_samples("noise", (1, 2, 2), "", 50, 3)
    assert torch.equal(samples, public_samples("noise", (1, 2, 2), "", 50, 3))
    one, again, next_one = (mixture(samples, 3, number) for number in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, next_one)
    torch.testing.assert_close(one.mean(0), samples.mean(0))  # a permutation keeps the mean


def received(one: Any, *, first: bool) -> list[np.ndarray]:
    return [(nothing(SAMPLES * 10) if first else packed(torch.full((SAMPLES, 10), 0.5), 0.25)).numpy()]


def test_a_reply_is_the_weighted_logits_of_held_back_accuracy(tmp_path: Path) -> None:
    """The weight is the accuracy on samples that are not trained on, a tenth of the 40; the logits are the model's."""
    flat = small_settings(method="fedakd", **{"fedakd.samples": SAMPLES, "fedakd.held-back": 0.1, "target": "mlp"})
    config = resolved(RunConfig.from_flat(flat))
    one = member(config, tmp_path)
    (reply,), count, _ = one.fit(received(one, first=True), {"round": 1, "version": 0, "kept-version": 0})
    data, rest = one.context.data, one.training_data()
    assert (count, len(rest.train_labels)) == (40, 36)
    kept = {tuple(image.flatten().tolist()) for image in rest.train_images}
    held = torch.tensor([tuple(image.flatten().tolist()) not in kept for image in data.train_images])
    assert int(held.sum()) >= 1
    weight = evaluate(one.model.eval(), data.train_images[held], data.train_labels[held]).accuracy
    assert reply[-1] == pytest.approx(weight)
    public = mixture(public_samples("noise", (1, 8, 8), config.data_root, SAMPLES, config.seed), config.seed, 1)
    logits = logits_on(one.model, public, 20)
    np.testing.assert_array_equal(reply, packed(logits, weight).numpy())
    assert unpacked(torch.zeros(301), SAMPLES) is unpacked(nothing(300), SAMPLES) is None


def test_with_noisy_steps_nothing_else_depends_on_the_records(tmp_path: Path) -> None:
    """All samples are trained on, by noisy steps, and the weight is 1: an accuracy would have no noise."""
    flat = small_settings(method="fedakd", **NOISY, **{"fedakd.samples": SAMPLES, "fedakd.held-back": 0.5})
    one = member(resolved(RunConfig.from_flat(flat)), tmp_path)
    (reply,), _, found = one.fit(received(one, first=True), {"round": 1, "version": 0, "kept-version": 0})
    assert one.training_data() is one.context.data
    assert (reply[-1], found["private-steps"]) == (1.0, 2)
    assert one.release().mechanism == "sampled-gaussian"


def test_the_aggregate_accuracy_is_that_after_the_digest(tmp_path: Path) -> None:
    """In a round, and after the last one, in which the target is of the last round's mixture."""
    flat = small_settings(method="fedakd", **{"fedakd.samples": SAMPLES, "target": "mlp", "num-rounds": 1})
    config = resolved(RunConfig.from_flat(flat))
    first = member(config, tmp_path)
    first.fit(received(first, first=True), {"round": 1, "version": 0, "kept-version": 0})
    found = [
        member(config, tmp_path).evaluate(received(first, first=each), {"version": 1})[2]["aggregate-loss"]
        for each in (True, False)
    ]
    _, _, trained = member(config, tmp_path).fit(
        received(first, first=False), {"round": 2, "version": 1, "kept-version": 1}
    )
    assert found[0] != found[1] == trained["aggregate-loss"]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"fedakd.unlabelled": "cifar10"},
            r"fedakd\.unlabelled: unlabelled samples must have the shape .* but cifar10 has",
        ),
        ({"fedakd.unlabelled": "digits"}, r"fedakd\.unlabelled must not be digits, the clients' own data set"),
        ({"fedakd.unlabelled": "nothing"}, r"fedakd\.unlabelled: unlabelled data must be noise or one of"),
    ],
)
def test_what_cannot_work_is_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        check_run(RunConfig.from_flat(small_settings(method="fedakd") | changes), (1, 8, 8), 10)


def test_the_clients_file_is_refused_however_it_is_spelled(tmp_path: Path) -> None:
    """Relative to data-root, through a link, or with a detour; a copy is another file, and its samples may differ."""
    file = tmp_path / "own.npz"
    digits = load_dataset("digits").train
    np.savez(file, images=digits.images[:200], labels=digits.labels[:200])
    (tmp_path / "link.npz").symlink_to(file)
    (tmp_path / "loop.npz").symlink_to(tmp_path / "loop.npz")
    spellings = ("own.npz", f"{tmp_path}/../{tmp_path.name}/own.npz", "link.npz")
    for spelling in spellings:
        settings = {"dataset": f"npz:{file}", "data-root": str(tmp_path), "fedakd.unlabelled": f"npz:{spelling}"}
        config = RunConfig.from_flat(small_settings(method="fedakd") | settings)
        with pytest.raises(ConfigError, match="the clients' own data set"):
            check_run(config, (1, 8, 8), 10)
        with pytest.raises(RefusalError, match="its own data set"):
            refuse_own_as_public(config, simulated=True)
    settings = {"dataset": f"npz:{file}", "data-root": str(tmp_path), "fedakd.unlabelled": "npz:loop.npz"}
    config = RunConfig.from_flat(small_settings(method="fedakd") | settings)
    with pytest.raises(ConfigError, match=r"cannot be compared: .* check the paths"):
        check_run(config, (1, 8, 8), 10)
    with pytest.raises(RefusalError, match=r"cannot be compared: .* check the paths"):
        refuse_own_as_public(config, simulated=True)
    settings = {"dataset": f"folder:{tmp_path}/set", "fedakd.unlabelled": f"folder:{tmp_path}/set/train"}
    config = RunConfig.from_flat(small_settings(method="fedakd") | settings)
    (tmp_path / "set" / "train").mkdir(parents=True)
    with pytest.raises(RefusalError, match="its own data set"):
        refuse_own_as_public(config, simulated=True)


@pytest.mark.parametrize(
    ("changes", "simulated", "refused"),
    [
        ({"fedakd.unlabelled": "npz:/data/own.npz"}, False, True),
        ({"fedakd.unlabelled": "folder:own"}, False, True),
        ({"fedakd.unlabelled": "npz:/data/own.npz"}, True, False),
        ({"fedakd.unlabelled": "digits"}, True, True),
        ({"fedakd.unlabelled": "mnist"}, False, False),
        ({"fedakd.unlabelled": "npz:/data/own.npz", "fedakd.samples": 0}, False, False),
        ({}, False, False),
    ],
)
def test_a_node_answers_on_no_samples_of_its_own(changes: dict[str, Any], simulated: bool, refused: bool) -> None:
    """The server must not choose files of the owner's machine as the samples on which models answer."""
    config = RunConfig.from_flat(small_settings(method="fedakd") | changes)
    with pytest.raises(RefusalError, match="what models compute on them would be sent") if refused else nullcontext():
        refuse_own_as_public(config, simulated=simulated)


def test_a_deployed_node_tells_the_server_why(tmp_path: Path) -> None:
    settings = small_settings(method="fedakd", output=str(tmp_path), **{"fedakd.unlabelled": "npz:/data/own.npz"})
    grid = InProcessGrid(app, 1, settings, {})
    (reply,) = grid.send_and_receive([Message(RecordDict(), dst_node_id=1000, message_type="query.hello")])
    (properties,) = reply.content.config_records.values()
    assert "npz:/data/own.npz, are files of this node or its own data set" in properties["problem"]


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"privacy.clip-norm": 50.0}, "privacy.clip-norm = 50"),
        ({"privacy.unit": "client", "privacy.clip-norm": 0.5, "privacy.noise-multiplier": 1e-3}, "privacy.clip-norm"),
        ({"privacy.unit": "client"}, "privacy.unit = client"),
    ],
)
def test_weighted_logits_are_not_clipped(changes: dict[str, Any], found: str, federate: Federate) -> None:
    """A clipped vector is a mixture with the one that was received, so that the quotient is that of neither."""
    with pytest.raises(ConfigError, match=rf"{found}.* must not be set with fedakd: its clients send weighted logits"):
        federate("fedakd", num_clients=3, target="mlp", **changes)
