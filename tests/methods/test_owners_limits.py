"""A node's limits hold whatever settings the server names: stored state stays, and no few samples or steps answer."""

import json
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, RecordDict

from clients.engine.base import BaseClient
from clients.engine.context import ClientContext
from clients.engine.node_checks import REFUSED, NodeChecks, checks_of
from clients.novel.answers import CLASSIFIERS, classifier_errors, classifier_gradients
from clients.novel.joining import JoiningNode
from hyperfl_flwr.app.methods import client_of
from hyperfl_flwr.app.resolved import resolved
from hyperfl_flwr.config.node_config import NodeConfig
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.config.table import with_defaults
from hyperfl_flwr.core.errors import RefusalError
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.data.federated_data import ClientData
from hyperfl_flwr.models.initialisation import initial_model
from hyperfl_flwr.models.model_spec import TargetRecipe
from hyperfl_flwr.models.targets import build_target
from hyperfl_flwr.node.private_state import PrivateState
from hyperfl_flwr.privacy.budget import PrivacyBudget
from hyperfl_flwr.protocol.arrays import per_client_key
from hyperfl_flwr.protocol.messages import PER_CLIENT_ARRAYS
from hyperfl_flwr.protocol.packing import pack_arrays
from hyperfl_flwr.protocol.queries import JOINING, RECIPE, JoiningStep, QuerySpec

EXPERIMENT = "0123456789abcdef"
COMMON: Mapping[str, Scalar] = {"dataset": "digits", "target": "mlp", "batch-size": 10, "num-rounds": 2}


def data_of(samples: int) -> ClientData:
    rng = torch.Generator().manual_seed(0)
    images, labels = torch.rand(samples, 1, 8, 8, generator=rng), torch.randint(0, 10, (samples,), generator=rng)
    return ClientData(
        train_images=images, train_labels=labels, test_images=images[:5], test_labels=labels[:5], augmentation=None,
        num_classes=10, train_weights=None, validation=(images[:5], labels[:5]),
    )  # fmt: skip


def client(folder: Path, samples: int, server_round: int, checks: NodeChecks | None, **settings: Scalar) -> BaseClient:
    config = resolved(RunConfig.from_flat(with_defaults({**COMMON, **settings})))
    context = ClientContext(
        config=config, client=0, data=data_of(samples), device=torch.device("cpu"), mean=(0.0,), std=(1.0,),
        state=PrivateState(folder / EXPERIMENT, EXPERIMENT, 0), round=server_round, checks=checks,
        budget=PrivacyBudget(path=folder / "privacy.jsonl", experiment=EXPERIMENT, client=0, is_only_client=True),
    )  # fmt: skip
    return client_of(config.method)(context)


def test_what_a_client_has_stored_is_not_sent_in_place_of_what_it_has_received(tmp_path: Path) -> None:
    """Without the node's record of runs: `local` stores a private model, and `fedavg` shares a group of that name."""
    best: Mapping[str, Scalar] = {"keep": "best", "data.validation-fraction": 0.2}
    member = client(tmp_path, 40, 1, None, method="local", **best)
    member.fit([], {"round": 1, "version": 0, "kept-version": 0})
    private = [value.clone().numpy() for value in member.groups["model"].state_dict().values()]
    later = client(tmp_path, 40, 2, None, **{"method": "fedavg", "dp.epsilon": 1.0, "learning-rate": 1e-30, **best})
    sent, _, _ = later.fit([np.zeros_like(value) for value in private], {"round": 2, "version": 1, "kept-version": 1})
    assert all(np.abs(value).max() < 1e-20 for value in sent)
    assert later.best is not None


def limits(notes: list[str], **least: int) -> NodeChecks:
    return NodeChecks(rules={}, note=notes.append, **{"min_samples": 1, "min_steps": 1, "min_test_samples": 1, **least})


@pytest.mark.parametrize("settings", [{"knn-per.held-back": 0.995}, {"fedakd.held-back": 0.9, "fedakd.samples": 50}])
def test_samples_that_are_held_back_do_not_count(settings: Mapping[str, Scalar], tmp_path: Path) -> None:
    (method,) = {key.partition(".")[0] for key in settings}
    notes: list[str] = []
    member = client(tmp_path, 200, 1, limits(notes, min_samples=100), method=method, **settings)
    with pytest.raises(RefusalError, match="min-samples = 100"):
        member.require_size()
    assert "no answer is sent" in notes[0]
    client(tmp_path, 200, 1, limits(notes, min_samples=100), method="fedavg").require_size()


@pytest.mark.parametrize("settings", [{"knn-per.held-back": 0.9}, {"fedakd.held-back": 0.9, "fedakd.samples": 50}])
def test_one_sample_is_trained_on_whatever_is_held_back(settings: Mapping[str, Scalar], tmp_path: Path) -> None:
    """Nine tenths of four samples are rounded to all of them."""
    (method,) = {key.partition(".")[0] for key in settings}
    member = client(tmp_path, 200, 1, None, method=method, **settings)
    data = member.context.data.with_training(torch.arange(4))
    again = client_of(method)(replace(member.context, data=data))
    assert len(again.training_data().train_labels) == 1


def test_the_steps_of_an_encoder_count(tmp_path: Path) -> None:
    least = limits([], min_steps=4)
    few: Mapping[str, Scalar] = {
        "method": "it-pfl", "it-pfl.encoder-steps": 1, "it-pfl.encoder-batch-size": 1, "it-pfl.fine-tune-rounds": 1,
    }  # fmt: skip
    with pytest.raises(RefusalError, match="min-steps = 4, but the answer would come from 1 local step;"):
        client(tmp_path, 200, 1, least, **few).require_size()
    client(tmp_path, 200, 2, least, **few).require_size()  # the encoder is constant


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("pfedhn", {"pfedhn.local-steps": 5}),
        ("pfedhn-pc", {"pfedhn.local-steps": 5}),
        ("priv-hfl", {"priv-hfl.local-steps": 5}),
        ("it-pfl", {"it-pfl.encoder-steps": 5, "it-pfl.encoder-batch-size": 10, "it-pfl.fine-tune-rounds": 1}),
    ],
)
def test_samples_that_no_batch_has_do_not_count(method: str, settings: Mapping[str, Scalar], tmp_path: Path) -> None:
    """Five steps of batches of ten use 50 of 200 samples; one step on one sample would give that sample away."""
    own = {"method": method, "batch-size": 10, **settings}
    client(tmp_path, 200, 1, limits([], min_samples=50), **own).require_size()
    fewer = {key: 9 if key.endswith("batch-size") else value for key, value in own.items()}
    for changed in (fewer, {key: 4 if key.endswith("steps") else value for key, value in own.items()}):
        with pytest.raises(RefusalError, match=r"min-samples = 50, but the answer would come from 4[05] training"):
            client(tmp_path, 200, 1, limits([], min_samples=50), **changed).require_size()


def test_samples_with_small_weights_count_less(tmp_path: Path) -> None:
    """A server's class weights can have a few samples drawn nearly always."""
    made = client(tmp_path, 200, 1, limits([], min_samples=150), method="fedavg")
    weights = np.ones(200)
    for factor, expected in ((1.0, True), (100.0, False)):
        weights[:20] = factor
        member = client_of("fedavg")(replace(made.context, data=replace(made.context.data, train_weights=weights)))
        if expected:
            member.require_size()
        else:
            with pytest.raises(RefusalError, match="min-samples = 150, but the answer would come from 23 training"):
                member.require_size()


def test_a_refusal_says_nothing_about_labels_of_a_limited_budget(tmp_path: Path) -> None:
    """With class weights of its choice a server would find the number of samples of each class."""
    made = client(tmp_path, 200, 1, limits([], min_samples=150), method="local")
    assert made.context.budget is not None
    limited = replace(made.context, budget=replace(made.context.budget, max_epsilon=4.0))
    weights = np.where(np.arange(200) < 20, 10.0, 1.0)
    for context, refuses in ((made.context, True), (limited, False)):
        member = client_of("local")(replace(context, data=replace(context.data, train_weights=weights)))
        with pytest.raises(RefusalError, match="min-samples") if refuses else nullcontext():
            member.require_size(scores=False)


def test_few_test_samples_are_refused_where_a_score_leaves(tmp_path: Path) -> None:
    """FedAKD's weight is an accuracy on held-back samples."""
    member = client(tmp_path, 200, 1, limits([], min_test_samples=50), method="fedavg")
    number = len(member.context.data.test_labels)
    assert 0 < number < 50
    with pytest.raises(RefusalError, match=f"min-test-samples = 50, but the answer would come from {number} test"):
        member.require_size()
    member.require_size(scores=False)
    own: Mapping[str, Scalar] = {"method": "fedakd", "fedakd.samples": 50}
    for share, enough in ((0.005, False), (0.1, True)):
        member = client(
            tmp_path, 200, 1, limits([], min_test_samples=min(number, 5)), **own, **{"fedakd.held-back": share}
        )
        if enough:
            member.require_size()
        else:
            with pytest.raises(RefusalError, match="but the answer would come from 1 test or validation sample;"):
                member.require_size()


def test_an_answer_about_two_samples_is_refused(tmp_path: Path) -> None:
    """A classifier of zeros would get one of them back; the run's settings make the client a novel one."""
    settings: Mapping[str, Scalar] = {"method": "pfedhn", "num-clients": 1, "novel.clients": 1}
    member = client(tmp_path, 200, 1, limits([], min_samples=50), **settings)
    member.context = replace(member.context, client=1)
    member.require_size()
    classifiers = {CLASSIFIERS: np.zeros((1, 65), np.float32)}
    for answer in (classifier_gradients, classifier_errors):
        with pytest.raises(RefusalError, match="min-samples = 50, but the answer would come from 1 training sample;"):
            answer(member, classifiers, QuerySpec(samples=2))
        assert answer(member, classifiers, QuerySpec())[1] in (100, 200)


def test_a_client_of_which_nearly_all_samples_are_held_back_is_not_excepted(tmp_path: Path) -> None:
    settings: Mapping[str, Scalar] = {"method": "knn-per", "knn-per.held-back": 0.999, "num-clients": 1}
    member = client(tmp_path, 90, 1, limits([], min_samples=50), **settings)
    member.context = replace(member.context, client=1)
    with pytest.raises(RefusalError, match="min-samples = 50, but the answer would come from 1 training sample;"):
        member.require_size()


@pytest.mark.parametrize("partition", [0, 30])
def test_the_models_of_a_join_that_was_given_up_are_forgotten(partition: int, tmp_path: Path) -> None:
    """The ledger says so: a server could begin again to have what it sends not compared."""
    joining, recipe = joining_node(tmp_path, {"partition-id": partition, "check-change": "refuse"})
    notes: list[str] = []
    checks = checks_of(joining.node, notes.append)
    for target in ("mlp", "mlp-500"):  # of another server
        for number in (1, 2):
            sent, count = joining._train(join_message(joining, replace(recipe, target=target), number), checks)
            assert (len(sent) > 0, count) == (True, 16)
            assert len(notes) == (target == "mlp-500")
    assert notes[0].startswith(
        f"round 1: client {partition}: the join begins again, so what it receives is not compared"
    )
    kept = list((tmp_path / "out").rglob("received-*.npz"))
    assert len(kept) == 2
    joining._train(join_message(joining, replace(recipe, target="mlp-500"), 3, is_last=True), checks)
    assert list((tmp_path / "out").rglob("received-*.npz")) == []
    assert sorted(path.name for path in (tmp_path / "out").iterdir() if path.is_dir()) == []


@pytest.mark.parametrize(("least", "reason"), [({"min-samples": 50}, "min-samples"), ({"min-steps": 5}, "min-steps")])
def test_the_limits_hold_for_a_node_that_joins(least: Mapping[str, Scalar], reason: str, tmp_path: Path) -> None:
    joining, recipe = joining_node(tmp_path, least)
    notes: list[str] = []
    with pytest.raises(RefusalError, match=reason) as caught:
        joining._train(join_message(joining, recipe, 1), checks_of(joining.node, notes.append))
    assert caught.value.public == REFUSED
    assert reason in notes[0]


def joining_node(folder: Path, settings: Mapping[str, Scalar]) -> tuple[JoiningNode, TargetRecipe]:
    """Return a node with 16 training samples that joins a run, and the form of its network."""
    rng = np.random.default_rng(0)
    np.savez(folder / "own.npz", images=rng.integers(0, 256, (20, 6, 5), dtype=np.uint8), labels=np.arange(20) % 4)
    own = {"join-data": f"npz:{folder / 'own.npz'}", "novel-output": str(folder / "out"), "partition-id": 0}
    node = NodeConfig.of({**own, "state-dir": str(folder / "state"), "num-partitions": 31, "device": "cpu", **settings})
    joining = JoiningNode.of(node)
    assert joining is not None
    recipe = TargetRecipe(target="mlp", input_shape=(1, 6, 5), mean=(0.5,), std=(0.5,), classes=("0", "1", "2", "3"))
    return joining, recipe


def join_message(joining: JoiningNode, recipe: TargetRecipe, number: int, *, is_last: bool = False) -> RecordDict:
    settings = with_defaults({"method": "pfedhn", "pfedhn.local-steps": 1, "batch-size": 50, "learning-rate": 0.01})
    flat = resolved(RunConfig.from_flat(settings)).flat()
    step = JoiningStep(settings=json.dumps(flat), number=number, is_last=is_last)
    model = initial_model(build_target(recipe.target, recipe.input_shape, 4), 0)
    arrays = {per_client_key(joining.client, f"model/{name}"): value.numpy() for name, value in model.items()}
    return RecordDict(
        {JOINING: step.to_record(), RECIPE: ConfigRecord(recipe.values()), PER_CLIENT_ARRAYS: pack_arrays(arrays)}
    )
