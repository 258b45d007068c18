"""pFedHN with clients of different target networks under one hypernetwork."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from html_pages import Page

from hyperfl_flwr.audit.audit import audit
from hyperfl_flwr.audit.make_round import make_attacked_round
from hyperfl_flwr.audit.options import Options
from hyperfl_flwr.config.table import default_settings
from hyperfl_flwr.contract.base import NUM_CLIENTS, SMALL, Federate
from hyperfl_flwr.contract.folders import last_checkpoint, outcome
from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.models.server_hypernetwork import ServerHypernetwork
from hyperfl_flwr.models.targets import build_target
from hyperfl_flwr.node.ledger import read_ledger
from hyperfl_flwr.results.report import write_report
from hyperfl_flwr.runs.checkpoint import SERVER, Checkpoints

TWO: dict[str, Scalar] = {"pfedhn.targets": "cnn, mlp"}
"""Clients 0, 2 and 4 train the CNN, clients 1 and 3 the MLP."""

NAMES = ("cnn", "mlp", "cnn", "mlp", "cnn")


def results(run: Path) -> dict[str, Any]:
    """Return everything that does not depend on the nodes."""
    found = outcome(run)
    for row in found["metrics"]:
        row.pop("bytes_on_wire", None)
    return found


def test_a_step_that_ends_in_no_number_is_taken_back(federate: Federate, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the second of two rounds: the run says so, and its state is that after the first."""
    update, calls = ServerHypernetwork.update, []

    def broken(self: ServerHypernetwork, *given: Any) -> None:
        update(self, *given)
        calls.append(self)
        if len(calls) == 2:
            self.hypernetwork.head_bias.data[3] = float("nan")

    monkeypatch.setattr(ServerHypernetwork, "update", broken)
    run = federate("pfedhn", num_rounds=2, checkpoint_every=1)
    text = "round 2: warning: head_bias is not finite after the server's step, so the hypernetwork is kept as it was"
    assert text in (run / "server.log").read_text()
    first, last = (Checkpoints(run / "checkpoints").load(number)[0] for number in (1, 2))
    assert set(first) == set(last)
    assert any("momentum" in key for key in first)
    assert all(np.array_equal(first[key], last[key]) for key in first)


def num_parameters(name: str) -> int:
    return sum(parameter.numel() for parameter in build_target(name, (1, 8, 8), 10).parameters())


@pytest.mark.parametrize("method", ["pfedhn", "pfedhn-pc"])
def test_one_network_for_all_is_pfedhn_bit_for_bit(method: str, federate: Federate) -> None:
    """Whether the network is named once, several times, or by `target`: the checkpoint has the same names and bits."""
    expected = outcome(federate(method, target="mlp"))
    for names in ("mlp", "mlp,mlp"):
        assert outcome(federate(method, **{"pfedhn.targets": names})) == expected


@pytest.mark.parametrize("method", ["pfedhn", "pfedhn-pc"])
def test_the_number_of_nodes_and_a_resumption_do_not_change_it(method: str, federate: Federate) -> None:
    """Each node finds its clients' networks in the settings; the checkpoint holds all heads and their momentum."""
    plan: dict[str, Any] = {"fraction_train": 0.4, **TWO}
    straight = federate(method, 1, num_rounds=3, **plan)
    resumed = federate(method, 2, num_rounds=2, **plan)
    federate(method, 2, num_rounds=3, resume=str(resumed), output="", **plan)
    alone = federate(method, NUM_CLIENTS, num_rounds=3, **plan)
    assert results(resumed) == results(straight) == results(alone)
    names = {name.removeprefix(SERVER) for name in last_checkpoint(straight)[0]}
    heads = {f"{target}/head_{part}" for target in ("cnn", "mlp") for part in ("weight", "bias")}
    assert {*heads, *(f"momentum/{head}" for head in heads)} <= names
    assert "head_weight" not in names


def test_each_client_exchanges_its_own_network_only(federate: Federate) -> None:
    """By the ledgers of nodes with one client each: names, shapes and bytes are those of that client's network."""
    run = federate("pfedhn", NUM_CLIENTS, ledger=True, **TWO)
    entries, damaged = read_ledger(run / "clients")
    assert not damaged
    trainings = [entry for entry in entries if entry.kind == "train"]
    assert len(trainings) == 2 * 2 * NUM_CLIENTS
    for entry in trainings:
        (record,) = [record for record in entry.records if record.name == "per-client-arrays"]
        network = build_target(NAMES[entry.node], (1, 8, 8), 10)
        expected = {f"{entry.node}/model/{name}": list(value.shape) for name, value in network.named_parameters()}
        assert {array.name: array.shape for array in record.arrays} == expected
        assert sum(array.bytes for array in record.arrays) == 4 * num_parameters(NAMES[entry.node])


def test_the_page_names_the_clients_networks(federate: Federate) -> None:
    text = write_report(federate("pfedhn", **TWO)).read_text()
    Page(text)
    assert "<dt>Networks</dt><dd>cnn: clients 0, 2, 4; mlp: clients 1, 3</dd>" in text
    assert "<dt>Networks</dt>" not in write_report(federate("pfedhn")).read_text()


def test_an_audit_attacks_each_client_with_its_network() -> None:
    """The labels of single images are read off the gradients of both networks."""
    settings = default_settings() | SMALL | {"method": "pfedhn", "batch-size": 1, **TWO}
    options = Options(attacks=["idlg"], num_images=4, samples=1)
    finding = audit(make_attacked_round(settings, options), options)["idlg"]
    assert finding.labels_found == 1.0
    assert [result.labels is not None and len(result.labels) for result in finding.results] == [1] * 4


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        ("pfedhn", {"pfedhn.targets": "cnn,mpl"}, "pfedhn.targets must list names among cnn, .* got 'mpl'.*mlp"),
        ("pfedhn", {"pfedhn.targets": "cnn,"}, "pfedhn.targets must list names among cnn, .* got ''"),
        ("pfedhn", {"pfedhn.targets": "cnn,torchvision.models:alexnet"}, "got 'torchvision.models:alexnet'"),
        ("pfedhn", {"pfedhn.targets": "cnn,lenet"}, "the lenet target needs images of at least 16x16 pixels"),
        ("pfedhn", {"pfedhn.targets": "cnn,resnet18"}, "target = resnet18 has running statistics"),
        ("pfedhn", {"pfedhn.targets": ",".join(["cnn"] * 6)}, "at most one network for each of the 5 clients, got 6"),
        ("pfedhn", {**TWO, "novel.clients": 1}, "novel.clients must be 0 with several networks in pfedhn.targets"),
        ("it-pfl", TWO, "pfedhn.targets must be empty with it-pfl, got cnn, mlp"),
    ],
)
def test_lists_that_cannot_be_trained_are_refused(
    method: str, changes: dict[str, Scalar], message: str, federate: Federate
) -> None:
    with pytest.raises(ConfigError, match=message):
        federate(method, **changes)
