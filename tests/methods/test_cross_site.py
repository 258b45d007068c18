"""The cross-site matrix: each client's model on each client's data, where owners allow it."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from federations import small_settings, trained
from flwr.app import ArrayRecord, Message, MessageType, RecordDict

from clients.engine.cross_site import score_models, send_model
from hyperfl_flwr.app.client import app
from hyperfl_flwr.app.methods import check_run, client_of
from hyperfl_flwr.app.node import NodeApp
from hyperfl_flwr.config.node_config import NodeConfig
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.contract.grids import plain_grid
from hyperfl_flwr.core.errors import ConfigError, RefusalError, StateError
from hyperfl_flwr.data.federated_data import load_federated_data
from hyperfl_flwr.deploy.ledger_view import runs_of
from hyperfl_flwr.methods import METHODS
from hyperfl_flwr.models.targets import build_target
from hyperfl_flwr.node.saved_models import KeptModel
from hyperfl_flwr.privacy.budget import PrivacyBudget
from hyperfl_flwr.protocol.messages import ARRAYS, CONFIG, Request
from hyperfl_flwr.protocol.packing import pack_arrays
from hyperfl_flwr.protocol.queries import CORRECT, SCORE_MODELS, SEND_MODEL, QuerySpec
from hyperfl_flwr.results.report import write_report
from hyperfl_flwr.runs.cross_site import CrossSite
from hyperfl_flwr.runs.failures import read_failures
from hyperfl_flwr.server.exchange import exchange
from hyperfl_flwr.server.fetching import ReplyLimits
from hyperfl_flwr.server.in_process_grid import FIRST_NODE_ID, InProcessGrid
from strategies.engine.query_clients import Query, _limits

ABLE = [name for name in METHODS if client_of(name).is_network and not METHODS[name].weight_epsilon]
"""Methods whose clients' predictions are those of a network, without noise."""


def found_in(run):
    found = CrossSite.read(run)
    assert found is not None
    return found


def summary_of(run):
    return json.loads((run / "summary.json").read_text())


def owners_grid(tmp_path, willing, **more):
    """Return a grid of deployed nodes with a client each, of which some allow cross-site matrices."""

    def make(number, flat):
        grid = InProcessGrid(app, number, flat)
        for partition in range(number):
            own = {"state-dir": str(tmp_path / f"node-{partition}"), "device": "cpu", **more}
            own |= {"cross-site": True} if partition in willing else {}
            grid._contexts[FIRST_NODE_ID + partition].node_config |= own
        return grid

    return make


@pytest.mark.parametrize("method", ABLE)
def test_the_diagonal_is_the_personalized_accuracy(method, federate):
    """A model that has gone through two messages predicts as in the round in which it was measured."""
    run = federate(method, cross_site=True)
    found, summary = found_in(run), summary_of(run)
    assert found.clients == list(range(5))
    diagonal = [row[number] for number, row in enumerate(found.accuracy)]
    assert diagonal == pytest.approx(summary["test_accuracy_per_client"], abs=1e-12)
    assert summary["cross_site_own"] == pytest.approx(summary["test_accuracy"])
    others = np.asarray(found.accuracy)[~np.eye(5, dtype=bool)]
    assert summary["cross_site_others"] == pytest.approx(others.mean())


def test_each_number_is_that_of_the_kept_model_on_the_clients_data(federate):
    run = federate("fedrep", cross_site=True)
    found = found_in(run)
    data = load_federated_data(RunConfig.from_flat(small_settings(method="fedrep")).data_settings())
    assert found.samples == [len(data.test_indices(client)) for client in found.clients]
    for row, client in enumerate(found.clients):
        kept = KeptModel.read(run / "clients" / f"client-{client:05d}")
        network = build_target(kept.recipe.target, kept.recipe.input_shape, len(kept.recipe.classes))
        network.load_state_dict({name: torch.tensor(value) for name, value in kept.tensors.items()}, assign=True)
        for column, other in enumerate(found.clients):
            samples = data.client(other)
            with torch.no_grad():
                right = network.eval()(samples.test_images).argmax(dim=1) == samples.test_labels
            assert found.accuracy[row][column] == pytest.approx(right.double().mean().item())


def test_it_is_of_the_best_models_where_those_are_kept(federate):
    best = {"keep": "best", "data.validation-fraction": 0.3, "num-rounds": 3, "cross-site": True}
    run = federate("fedavg", **best)
    found = found_in(run)
    diagonal = [row[number] for number, row in enumerate(found.accuracy)]
    assert diagonal == pytest.approx(summary_of(run)["test_accuracy_per_client"])


def test_nothing_else_of_a_run_changes(federate):
    plain, crossed = federate("hyperfl"), federate("hyperfl", cross_site=True)
    assert not (plain / "cross_site.json").exists()
    assert "cross_site_own" not in summary_of(plain)
    one, two = (
        [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in (plain, crossed)
    )
    keys = ("kind", "round", "client", "personalized_accuracy", "aggregate_accuracy", "loss", "train_loss")
    assert [[each.get(key) for key in keys] for each in one] == [[each.get(key) for key in keys] for each in two]


def test_many_models_travel_in_several_messages(federate, monkeypatch):
    whole = found_in(federate("fedrep", cross_site=True))
    monkeypatch.setattr("strategies.engine.cross_site.MESSAGE_BYTES", 1)
    several = found_in(federate("fedrep", cross_site=True))
    assert several.bytes_on_wire > whole.bytes_on_wire
    assert replace(several, bytes_on_wire=whole.bytes_on_wire) == whole


def test_the_report_shows_it(federate):
    run = federate("fedrep", cross_site=True)
    page = write_report(run).read_text()
    assert "Cross-site matrix" in page
    assert "the models of 5 clients have an accuracy of".capitalize() in page
    assert "but for the whole models of the cross-site matrix" in page
    first = found_in(run).rows()[0]
    assert "".join(f'<td class="number">{value}</td>' for value in first[1:]) in page


def test_owners_who_do_not_allow_it_are_left_out(federate, tmp_path):
    run = federate("fedrep", 5, grid=owners_grid(tmp_path, (0, 2, 3)), cross_site=True)
    found = found_in(run)
    assert found.clients == [0, 2, 3]
    assert [failure for failure in read_failures(run) if failure.phase == "cross-site"] == []
    for partition in range(5):
        sent = [
            entry.kind for entry in runs_of(tmp_path / f"node-{partition}")[0][0].entries if entry.direction == "out"
        ]
        assert (SEND_MODEL in sent, SCORE_MODELS in sent) == (partition in (0, 2, 3),) * 2


def test_without_two_owners_there_is_none(federate, tmp_path):
    run = federate("fedrep", 5, grid=owners_grid(tmp_path, (1,)), cross_site=True)
    assert CrossSite.read(run) is None
    assert "no matrix, because nodes with 1 of 5 clients allow it" in (run / "server.log").read_text()


@pytest.mark.parametrize("kind", [SEND_MODEL, SCORE_MODELS])
@pytest.mark.parametrize(("asked", "willing"), [(True, False), (False, True), (False, False)])
def test_a_node_refuses_what_its_owner_or_the_run_does_not_name(kind, asked, willing, federate, tmp_path):
    """A server that asks although it must not gets a refusal and no array."""
    grids = []

    def make(number, flat):
        grids.append(owners_grid(tmp_path, (0,) if willing else ())(number, flat))
        return grids[0]

    run = federate("fedrep", 1, grid=make, cross_site=asked, num_clients=1)
    experiment = json.loads((run / "manifest.json").read_text())["experiment"]
    request = Request(round=2, experiment=experiment, run_directory="", clients=[0], versions=[0], kept_versions=[0])
    content = RecordDict({ARRAYS: ArrayRecord(), CONFIG: request.to_record(), "question": QuerySpec().to_record()})
    reply = grids[0].send_and_receive([Message(content, dst_node_id=FIRST_NODE_ID, message_type=kind)])[0]
    assert reply.has_error()
    assert reply.error.reason.startswith("models are exchanged only in runs with cross-site = true")


def asked_again(settings, own, kind, experiment, **changes):
    """Return a node's answer to a message about an earlier run, with settings that the server chooses."""
    grid = InProcessGrid(app, 1, {**settings, **changes})
    grid._contexts[FIRST_NODE_ID].node_config |= own
    request = Request(round=3, experiment=experiment, run_directory="", clients=[0], versions=[2], kept_versions=[2])
    content = RecordDict({ARRAYS: ArrayRecord(), CONFIG: request.to_record(), "question": QuerySpec().to_record()})
    return grid.send_and_receive([Message(content, dst_node_id=FIRST_NODE_ID, message_type=kind)])[0]


@pytest.mark.parametrize(
    ("asked", "reason"),
    [(False, "the settings cross-site are not those of this run's first message"), (True, "both from the run's first")],
)
def test_models_of_runs_without_it_do_not_leave(asked, reason, federate, tmp_path):
    """The server asks for them later, in a run that had not asked, or of a node whose owner had not allowed it."""
    own = {"state-dir": str(tmp_path / "node-0"), "device": "cpu"}
    run = federate("fedrep", 1, grid=owners_grid(tmp_path, ()), num_clients=1, cross_site=asked)
    manifest = json.loads((run / "manifest.json").read_text())
    assert (tmp_path / "node-0" / manifest["experiment"] / "client-00000" / "model.npz").is_file()
    own |= {"cross-site": True}
    asking = manifest["settings"] | {"cross-site": True}
    for kind in (MessageType.TRAIN, MessageType.EVALUATE):
        assert asked or asked_again(asking, own, kind, manifest["experiment"]).has_error()
    for query in (SEND_MODEL, SCORE_MODELS):
        reply = asked_again(asking, own, query, manifest["experiment"])
        assert reply.has_error()
        assert reason in reply.error.reason


@pytest.mark.parametrize("kind", [MessageType.TRAIN, MessageType.EVALUATE])
def test_a_run_keeps_what_it_began_with(kind, federate, tmp_path):
    """A server cannot promise more privacy in some messages of a run and ask for the models in others."""
    own = {"state-dir": str(tmp_path / "node-0"), "device": "cpu", "cross-site": True}
    run = federate("fedrep", 1, grid=owners_grid(tmp_path, (0,)), num_clients=1, cross_site=True)
    manifest = json.loads((run / "manifest.json").read_text())
    private = manifest["settings"] | {"cross-site": False, "dp.epsilon": 1.0}
    reply = asked_again(private, own, kind, manifest["experiment"])
    assert reply.has_error()
    assert "the settings cross-site, dp.epsilon are not those of this run's first message" in reply.error.reason
    reply = asked_again(manifest["settings"], own | {"cross-site": False}, kind, manifest["experiment"])
    assert reply.has_error()
    assert "this run began with cross-site = true, which must stay" in reply.error.reason


def test_models_of_another_client_are_not_sent(federate):
    run = federate("fedrep", cross_site=True)
    folders = [run / "clients" / f"client-{number:05d}" / "model.npz" for number in (0, 1)]
    member = member_of(run)
    folders[0].write_bytes(folders[1].read_bytes())
    with pytest.raises(StateError, match="the kept model is of client 1"):
        send_model(member, {}, QuerySpec())
    folders[0].unlink()
    with pytest.raises(StateError, match="no round has trained it on this node") as caught:
        send_model(member, {}, QuerySpec())
    assert caught.value.public


def test_replies_with_whole_models_are_within_the_limits():
    """A question without arrays asks for arrays of many bytes; the limits of its reply allow them."""
    arrays = {f"personalized/{number}": np.zeros(1_000_000, np.float32) for number in range(600)}
    query = Query(kind=SEND_MODEL, clients=[0, 1], expected={0: arrays, 1: arrays})
    question = Message(RecordDict(), dst_node_id=1, message_type=SEND_MODEL)
    limits = _limits(question, [0, 1], query)
    assert limits.num_bytes > 2 * 600 * 4_000_000 * 1.1
    assert limits.num_objects > 2 * 600 * (1 + 4)
    assert ReplyLimits.to(question.content).num_bytes < 17_000_000


def test_the_limits_are_those_of_each_question(federate, monkeypatch):
    """What reads a reply gets the limits that the query's expected arrays need."""
    given = []

    def noted(grid, messages, timeout, before_resending=None, limits=()):
        given.extend(zip((message.metadata.message_type for message in messages), limits, strict=True))
        return exchange(grid, messages, timeout, before_resending, limits)

    monkeypatch.setattr("strategies.engine.query_clients.exchange", noted)
    run = federate("fedrep", cross_site=True)
    model = sum(value.nbytes for value in KeptModel.read(run / "clients" / "client-00000").tensors.values())
    asked = [limits.num_bytes for kind, limits in given if kind == SEND_MODEL]
    plain = ReplyLimits.to(RecordDict()).num_bytes
    assert len(asked) == 2
    assert all(number >= plain + 8 * 2 * model for number in asked)  # two or three clients on each node


def test_clients_that_no_round_has_trained_are_left_out(federate):
    run = federate("fedrep", cross_site=True, **{"fraction-train": 0.4, "last-round": "sampled", "num-rounds": 1})
    assert len(found_in(run).clients) == 2
    reasons = [failure.reason for failure in read_failures(run) if failure.phase == "cross-site"]
    assert len(reasons) == 3
    assert all("no round has trained it" in reason for reason in reasons)


def test_after_an_early_end_it_is_of_the_last_round(federate):
    stopping = {"early-stopping": 1, "data.validation-fraction": 0.3, "learning-rate": 1e-9, "num-rounds": 30}
    run = federate("fedrep", cross_site=True, **stopping, **{"fraction-train": 0.4, "last-round": "sampled"})
    last = summary_of(run)["rounds"]
    assert last < 30
    assert {failure.round for failure in read_failures(run) if failure.phase == "cross-site"} <= {last}


def test_the_report_says_what_left_where_no_matrix_was_made(federate, tmp_path):
    run = federate("fedrep", 5, grid=owners_grid(tmp_path, (0, 1), **{"max-message-mb": 0.1}), cross_site=True)
    assert CrossSite.read(run) is None
    assert "but for the whole models of the cross-site matrix" in write_report(run).read_text()


def test_the_ledger_says_that_whole_models_left(federate, tmp_path, call):
    federate("fedrep", 5, grid=owners_grid(tmp_path, (0, 1)), cross_site=True)
    for partition, left in ((0, True), (4, False)):
        code, text, _ = call("ledger", tmp_path / f"node-{partition}")
        assert code == 0
        assert ("whole models" in text) is left
        page = tmp_path / f"{partition}.html"
        assert call("ledger", tmp_path / f"node-{partition}", "--output", page)[0] == 0
        assert ("Whole models have left the node" in page.read_text()) is left
        assert ("All private groups stayed on the node" in page.read_text()) is not left


def test_an_owners_budget_refuses_it(federate, tmp_path):
    """Models and answers without noise are beyond any epsilon, whatever the server has promised before."""
    run = federate("fedrep", cross_site=True)
    member, kept = member_of(run), KeptModel.read(run / "clients" / "client-00000")
    budget = PrivacyBudget(path=tmp_path / "privacy.jsonl", experiment="run", client=0, max_epsilon=500.0)
    member.context = replace(member.context, budget=budget)
    models = {f"personalized/{name}": value[np.newaxis] for name, value in kept.tensors.items()}
    for answer, received in ((send_model, {}), (score_models, models)):
        with pytest.raises(RefusalError, match="nothing on the node bounds what the run's uploads reveal"):
            answer(member, received, QuerySpec())


@pytest.mark.parametrize(
    ("method", "changes", "text"),
    [
        ("fedavg", {"dp.epsilon": 1.0}, "dp.epsilon above 0"),
        ("fedavg", {"privacy.unit": "client", "privacy.clip-norm": 1.0}, "privacy.unit = client"),
        ("fedavg", {"privacy.clip-norm": 1.0, "privacy.noise-multiplier": 0.1}, "privacy.noise-multiplier above 0"),
        ("fedavg", {"secagg.enabled": True}, "secagg.enabled"),
        *((name, {}, name) for name in METHODS if METHODS[name].weight_epsilon),
    ],
)
def test_it_is_refused_where_models_are_protected(method, changes, text):
    with pytest.raises(ConfigError, match=f"cross-site must be false with {re.escape(text)}"):
        RunConfig.from_flat(small_settings(method=method, cross_site=True, **changes))


def test_methods_without_one_network_are_refused():
    config = RunConfig.from_flat(small_settings(method="knn-per", cross_site=True))
    with pytest.raises(ConfigError, match="cross-site must be false with knn-per, got true"):
        check_run(config, (1, 8, 8), 10)
    mixed = {"priv-hfl.mixing": True}
    config = RunConfig.from_flat(small_settings(method="priv-hfl", cross_site=True, **mixed))
    with pytest.raises(ConfigError, match=r"cross-site must be false with priv-hfl\.mixing"):
        check_run(config, (1, 8, 8), 10)
    config = RunConfig.from_flat(small_settings(method="pfedhn", cross_site=True, **{"pfedhn.targets": "cnn,mlp"}))
    with pytest.raises(ConfigError, match="different networks, got cnn, mlp"):
        check_run(config, (1, 8, 8), 10)


def test_an_owner_who_keeps_no_model_cannot_take_part():
    with pytest.raises(ConfigError, match="cross-site needs keep-model"):
        NodeConfig.of({"keep-model": False, "cross-site": True})


def member_of(run, client=0):
    """Return a client of a finished simulation, as a message after the last round has it."""
    manifest = json.loads((run / "manifest.json").read_text())
    config = NodeConfig.of_context(next(iter(plain_grid(1, manifest["settings"])._contexts.values())))
    request = Request(
        round=2, experiment=manifest["experiment"], run_directory=str(run), clients=[client], versions=[0],
        kept_versions=[0],
    )  # fmt: skip
    return NodeApp(config, manifest["settings"]).cohort(request, lambda _: None).make_client(client)


class TestScoring:
    """A client's check of the models that it is to evaluate."""

    @pytest.fixture
    def member(self, tmp_path):
        run = trained(small_settings(method="fedrep", output=str(tmp_path / "run"), cross_site=True))
        kept = KeptModel.read(run / "clients" / "client-00000")
        return member_of(run), {
            f"personalized/{name}": np.stack([value, value]) for name, value in kept.tensors.items()
        }

    def test_right_models_are_counted(self, member):
        client, models = member
        found, number = score_models(client, models, QuerySpec())
        assert found[CORRECT].shape == (2,)
        assert number == len(client.context.data.test_labels)
        pack_arrays(found)

    def test_wrong_models_are_refused(self, member):
        client, models = member
        name = next(iter(models))
        wrong = [
            {},
            {key: value for key, value in models.items() if key != name},
            models | {"personalized/more": np.zeros((2, 1), np.float32)},
            models | {"other/more": np.zeros((2, 1), np.float32)},
            models | {name: models[name][:1]},
            models | {name: np.zeros((), np.float32)},
            {key: value[:0] for key, value in models.items()},
            models | {name: np.zeros((2, 7), np.float32)},
        ]
        for each in wrong:
            with pytest.raises(ValueError, match="models to evaluate"):
                score_models(client, each, QuerySpec())
        for question in (QuerySpec(samples=3), QuerySpec(corruption="blur")):
            with pytest.raises(ValueError, match="all samples, unchanged"):
                score_models(client, models, question)


def test_a_damaged_file_is_named(tmp_path):
    square = '{"clients": [0, 1], "samples": [1, 1], "accuracy": %s}'
    wrong = [
        square % cells
        for cells in ('[["a", "b"], ["c", "d"]]', '["ab", "cd"]', "[[0, NaN], [0, 1]]", "[[0, 2], [0, 1]]")
    ]
    for text in ("{", "{}", '{"clients": [0], "samples": [1], "accuracy": [[1]]}', "[]", *wrong):
        (tmp_path / "cross_site.json").write_text(text)
        with pytest.raises(StateError, match=r"cross_site\.json is damaged"):
            CrossSite.read(tmp_path)
    assert CrossSite.read(Path("/nonexistent")) is None


@pytest.mark.parametrize("names", ["mlp", "mlp,mlp"])
def test_one_name_of_networks_is_the_target(names, federate):
    """`target` is another network then, which no client trains."""
    listed = federate("pfedhn", cross_site=True, target="cnn", **{"pfedhn.targets": names})
    assert found_in(listed) == replace(
        found_in(federate("pfedhn", cross_site=True, target="mlp")), bytes_on_wire=found_in(listed).bytes_on_wire
    )
