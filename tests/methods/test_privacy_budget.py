"""The privacy budget of a node's clients: what runs and descriptors record and spend, and what the owner refuses."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from federations import small_settings
from flwr.app import Message, MessageType, RecordDict
from novel_owner import node_of
from test_personalize_node import descriptor_message, failure, reply_to

from clients.engine.adapter import _WORK
from clients.engine.context import client_setting
from hyperfl_flwr.app.budget import NOVEL_ANSWERS, budget_of, refuse_unbounded
from hyperfl_flwr.app.client import app
from hyperfl_flwr.app.methods import client_of
from hyperfl_flwr.app.personalize import open_run
from hyperfl_flwr.app.resolved import resolved
from hyperfl_flwr.config.node_config import NodeConfig
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.contract.base import Federate
from hyperfl_flwr.contract.grids import RepeatingGrid, Settings
from hyperfl_flwr.core.errors import RefusalError
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.data.federated_data import load_federated_data
from hyperfl_flwr.node.private_state import PrivateState
from hyperfl_flwr.privacy.budget import FILE, NEEDS_BOUND, PrivacyBudget, RecordedRelease, counted_epsilon, read_record
from hyperfl_flwr.privacy.gaussian_mechanism import smallest_sigma
from hyperfl_flwr.privacy.release import Release
from hyperfl_flwr.privacy.spent import spent
from hyperfl_flwr.protocol.messages import ARRAYS, CONFIG, Request
from hyperfl_flwr.protocol.packing import pack_arrays
from hyperfl_flwr.protocol.queries import ASSESS, CLASSIFIERS, ERRORS, GRADIENTS, QuerySpec
from hyperfl_flwr.server.in_process_grid import InProcessGrid

PRIVATE: Settings = {"dp.epsilon": 4.0, "dp.delta": 1e-5}
CLIENT: Settings = {"privacy.unit": "client", "privacy.clip-norm": 1.0, "privacy.noise-multiplier": 1.0}


def record_of_run(run: Path) -> list[RecordedRelease]:
    return read_record(run / "clients" / FILE)


def test_a_run_spends_what_its_settings_state(federate: Federate) -> None:
    """Two rounds of noisy steps: each client has two lines, and their epsilon is that of the settings."""
    run = federate("fedavg", num_clients=3, **PRIVATE)
    record = record_of_run(run)
    assert sorted((entry.client, entry.round) for entry in record) == [(c, r) for c in range(3) for r in (1, 2)]
    for row in spent(record, 1e-5):
        assert row.bounded_by == "client"
        if not row.experiment:
            assert 3.99 < row.record_epsilon <= 4.0


def test_a_run_without_noise_is_recorded_as_such(federate: Federate) -> None:
    assert [entry.release for entry in record_of_run(federate("fedrep", num_clients=2))] == [None] * 4


def test_a_client_that_uploads_nothing_spends_nothing(federate: Federate) -> None:
    assert not (federate("local", num_clients=2) / "clients" / FILE).exists()


def test_a_message_that_is_sent_again_is_counted_again(federate: Federate) -> None:
    run = federate("fedavg", grid=RepeatingGrid, num_clients=2, num_rounds=1, **PRIVATE)
    assert sorted((entry.client, entry.round) for entry in record_of_run(run)) == [(0, 1), (0, 1), (1, 1), (1, 1)]
    (row,) = (row for row in spent(record_of_run(run), 1e-5) if row.client == 0 and not row.experiment)
    assert row.record_epsilon > 4.5  # the noise is for one round


def limited_grid(limit: float) -> Callable[[int, Settings], InProcessGrid]:
    def make(num_nodes: int, settings: Settings) -> InProcessGrid:
        return InProcessGrid(app, num_nodes, settings, {"simulated": True, "max-epsilon": limit})

    return make


def test_an_owner_who_allows_less_than_the_run_needs(federate: Federate) -> None:
    """The first round is within the budget, the second one beyond it; its clients report why."""
    run = federate("fedavg", grid=limited_grid(3.0), num_clients=2, max_failed_rounds=5, failure_budget=1.0, **PRIVATE)
    assert {entry.round for entry in record_of_run(run)} == {1}
    reasons = [path.read_text() for path in (run / "failures").rglob("*") if path.is_file()]
    assert any("max-epsilon = 3" in reason for reason in reasons)


def test_an_owner_who_allows_exactly_what_the_run_needs(federate: Federate) -> None:
    run = federate("fedavg", grid=limited_grid(4.0), num_clients=2, **PRIVATE)
    assert {entry.round for entry in record_of_run(run)} == {1, 2}


def refused(method: str, **changes: Scalar) -> bool:
    config = resolved(RunConfig.from_flat(small_settings(method=method) | changes))
    node = NodeConfig.of({"max-epsilon": 4.0})
    refuse_unbounded(NodeConfig.of({}), config, range(5))  # without a budget, nothing is refused
    try:
        refuse_unbounded(node, config, range(5))
    except RefusalError as error:
        assert str(error) == NEEDS_BOUND  # noqa: PT017 - both outcomes are expected
        return True
    return False


def test_unbounded_runs_are_refused_at_the_handshake() -> None:
    published: Settings = PRIVATE | {"dp.heads": "published"}
    assert refused("fedavg")
    assert refused("hyperfl")
    assert refused("fedavg", **{"privacy.clip-norm": 1.0, "privacy.noise-multiplier": 1.0})  # obfuscation
    assert refused("fedrep", **published)
    assert not refused("fedavg", **published)  # which has no private classifier
    assert not refused("fedrep", **PRIVATE)
    assert not refused("local")
    assert not refused("fedrep", **CLIENT)
    assert refused("fedrep", **CLIENT, **{"privacy.noise": "server"})
    assert refused("fedrep", **CLIENT | {"privacy.noise-multiplier": 0.0})


def test_noise_in_sums_needs_known_nodes(tmp_path: Path) -> None:
    settings = small_settings(method="fedavg", **CLIENT, **{"privacy.noise": "sum", "secagg.enabled": True})
    config = resolved(RunConfig.from_flat(settings))
    with pytest.raises(RefusalError, match="no peers-file, so the server could invent"):
        refuse_unbounded(NodeConfig.of({"max-epsilon": 4.0}), config, [0])
    pinned: dict[str, Scalar] = {"max-epsilon": 4.0, "peers-file": str(tmp_path / "peers.toml")}
    refuse_unbounded(NodeConfig.of(pinned), config, [0])
    assert budget_of(NodeConfig.of(pinned), tmp_path, "a", 0).knows_nodes
    assert not budget_of(NodeConfig.of({}), tmp_path, "a", 0).knows_nodes


def test_the_server_reads_the_reason(tmp_path: Path) -> None:
    grid = InProcessGrid(app, 1, small_settings(method="fedavg", output=str(tmp_path)), {"max-epsilon": 4.0})
    (reply,) = grid.send_and_receive([Message(RecordDict(), dst_node_id=1000, message_type="query.hello")])
    (properties,) = reply.content.config_records.values()
    assert properties["problem"] == NEEDS_BOUND


def test_a_descriptor_is_spent_once(serving_run: Path, photographs: Path, tmp_path: Path) -> None:
    """A repeated message gets the same noise and spends nothing; a new output folder spends again."""
    state = tmp_path / "state"
    node = node_of(
        photographs, tmp_path / "out",
        **{"novel-epsilon": 1.0, "novel-delta": 0.01, "max-epsilon": 1.2, "max-epsilon-delta": 0.01,
           "state-dir": str(state)},
    )  # fmt: skip
    for _ in range(2):
        reply_to(InProcessGrid(app, 1, {}, node), descriptor_message(serving_run))
    (entry,) = read_record(state / FILE)
    assert entry.release == Release(
        unit="record", mechanism="gaussian", noise_multiplier=smallest_sigma(1.0, 0.01, 1.0), neighbours="replace-one"
    )
    (row, _) = spent([entry], 0.01)
    assert row.record_epsilon == pytest.approx(1.0, rel=1e-6)
    again = node | {"novel-output": str(tmp_path / "again")}
    reason = failure(reply_to(InProcessGrid(app, 1, {}, again), descriptor_message(serving_run)))
    assert reason == "the privacy budget that this node's owner allows (max-epsilon) does not suffice for this upload"
    assert not (tmp_path / "again" / "release.npz").exists()
    assert len(read_record(state / FILE)) == 1


def test_a_descriptor_without_noise(serving_run: Path, photographs: Path, tmp_path: Path) -> None:
    """It is recorded as unbounded, in the output folder of a simulation; with a budget it is refused."""
    plain = node_of(photographs, tmp_path / "plain", simulated=True)
    open_run(serving_run).serve(InProcessGrid(app, 1, {}, plain))
    assert [entry.release for entry in read_record(tmp_path / "plain" / FILE)] == [None]
    limited = node_of(photographs, tmp_path / "out", simulated=True, **{"max-epsilon": 4.0})
    assert NEEDS_BOUND in failure(reply_to(InProcessGrid(app, 1, {}, limited), descriptor_message(serving_run)))


def test_descriptors_of_a_run_are_recorded(federate: Federate) -> None:
    """Novel clients describe their samples with the run's epsilons and without noise."""
    run = federate(
        "it-pfl", num_clients=3, **{"novel.clients": 1, "novel.epsilons": "none,1,10", "it-pfl.pooling": "mean"}
    )
    novel = [entry.release for entry in record_of_run(run) if entry.client == 3]
    noises = {round(release.noise_multiplier, 6) for release in novel if release}
    assert noises == {round(smallest_sigma(epsilon, 0.01, 1.0), 6) for epsilon in (1.0, 10.0)}
    assert None in novel
    assert {release.neighbours for release in novel if release} == {"replace-one"}


@pytest.mark.parametrize("kind", [ASSESS, GRADIENTS, ERRORS])
@pytest.mark.parametrize("limit", [None, 4.0])
def test_answers_without_noise_are_recorded_or_refused(kind: str, limit: float | None, tmp_path: Path) -> None:
    """Zero classifiers over two samples answer with one of them: such an answer counts as bounded by nothing."""
    settings = small_settings(method="pfedhn", target="mlp", num_clients=1, **{"novel.clients": 1})
    config = resolved(RunConfig.from_flat(settings))
    data = load_federated_data(config.data_settings())
    budget = PrivacyBudget(path=tmp_path / FILE, experiment="a", client=1, max_epsilon=limit)
    context = client_setting(config, data, 1, torch.device("cpu"), PrivateState(tmp_path, "a", 1))
    member = client_of("pfedhn")(replace(context, round=2, budget=budget))
    width = data.client(1).train_images[0].numel()
    received: dict[str, np.ndarray] = {CLASSIFIERS: np.zeros((1, width + 1), np.float32)}
    if kind == ASSESS:
        received = {
            f"model/{name}": np.zeros((1, *v.shape), np.float32) for name, v in member.model.state_dict().items()
        }
    question = QuerySpec() if kind == ASSESS else QuerySpec(samples=2)
    if limit is not None:
        with pytest.raises(RefusalError, match="nothing on the node bounds"):
            _WORK[kind](member, received, question)
        return
    _WORK[kind](member, received, question)
    assert [(entry.round, entry.release) for entry in read_record(tmp_path / FILE)] == [(2, None)]


def test_a_node_that_becomes_a_novel_one_by_the_number_of_clients() -> None:
    """The server decides how many clients are trained; with num-clients=1, node 1 would answer queries."""
    for method, noise in (("fedavg", PRIVATE), ("pfedhn", {})):
        settings = small_settings(method=method, num_clients=1, **{"novel.clients": 1}) | noise
        with pytest.raises(RefusalError) as caught:
            refuse_unbounded(NodeConfig.of({"max-epsilon": 4.0}), resolved(RunConfig.from_flat(settings)), [1])
        assert str(caught.value) == NOVEL_ANSWERS


UNFIT: list[tuple[Settings, str]] = [
    ({"method": "it-pfl"} | PRIVATE, "dp.epsilon must be 0 with it-pfl"),  # its encoder is trained without noise
    ({"method": "fedavg", "privacy.clip-norm": 1.0} | PRIVATE, "dp.epsilon must be 0 with privacy.clip-norm = 1"),
    ({"method": "pfedhn"} | CLIENT, "privacy.unit must be none with pfedhn"),
    ({"method": "fedavg"} | CLIENT | {"privacy.noise": "server", "privacy.noise-multiplier": 0.0}, "must be above 0"),
]


@pytest.mark.parametrize(("changes", "why"), UNFIT)
def test_a_node_checks_what_the_server_must_have_checked(changes: Settings, why: str, tmp_path: Path) -> None:
    settings = small_settings(**{"num-clients": 1, **changes})
    grid = InProcessGrid(app, 1, settings, {"state-dir": str(tmp_path)})
    request = Request(round=1, experiment="0" * 16, run_directory="", clients=[0], versions=[0], kept_versions=[0])
    content = RecordDict({CONFIG: request.to_record(), ARRAYS: pack_arrays({})})
    (reply,) = grid.send_and_receive([Message(content, dst_node_id=1000, message_type=MessageType.TRAIN)])
    assert why in reply.error.reason
    assert not (tmp_path / FILE).exists()


def test_steps_without_noise_are_released_as_such(tmp_path: Path) -> None:
    """With `dp.*`, the step noise of it-pfl is that of its model; its encoder has none."""
    config = resolved(RunConfig.from_flat(small_settings(method="it-pfl", num_clients=1) | PRIVATE))
    data = load_federated_data(config.data_settings())
    context = client_setting(config, data, 0, torch.device("cpu"), PrivateState(tmp_path, "a", 0))
    assert client_of("it-pfl")(context).release() is None


def test_another_number_of_the_node_is_no_new_budget(tmp_path: Path) -> None:
    """A node's own data are the same data, whatever partition-id and client id a federation gives them."""
    release = Release(unit="record", mechanism="gaussian", noise_multiplier=2.0)
    limit = 1.1 * counted_epsilon([release], 1e-5)[1]
    own = {"max-epsilon": limit, "data": "npz:/own.npz"}
    budget_of(NodeConfig.of(own), tmp_path, "a", 0).spend(1, release)
    with pytest.raises(RefusalError, match="the 1 earlier ones have spent"):
        budget_of(NodeConfig.of(own), tmp_path, "b", 7).spend(1, release)
    named = own | {"data": "digits"}  # a data set that several clients of a node share has other samples for each
    budget_of(NodeConfig.of(named), tmp_path, "b", 7).spend(1, release)
