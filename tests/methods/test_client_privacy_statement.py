"""Differential privacy of whole clients: what is recorded of each release, and what is stated about a run."""

from collections import Counter

import pytest
from flwr.app import Error, Message, MessageType
from noisy_clients import NODES, C, Z, arrays_of, lines, noisy, privacy_of

from hyperfl_flwr.app.client import app
from hyperfl_flwr.contract.base import Federate
from hyperfl_flwr.contract.folders import exact, last_checkpoint
from hyperfl_flwr.contract.grids import RepeatingGrid, Settings
from hyperfl_flwr.flower.messages import ErrorCode
from hyperfl_flwr.privacy.accounting import client_epsilon
from hyperfl_flwr.privacy.budget import read_record
from hyperfl_flwr.server.in_process_grid import InProcessGrid
from strategies.engine.recorded import RecordedStrategy


@pytest.mark.parametrize("noise", ["server", "local", "sum"])
@pytest.mark.parametrize("method", ["fedrep", "hyperfl", "hyperfl-frozen", "fedprox"])
def test_every_release_is_a_line_and_in_the_statement(method: str, noise: str, federate: Federate) -> None:
    """Two rounds, also with half of the clients in the first: two lines with the crowd, the epsilon of two releases."""
    embedding = {"hyperfl.embedding": "common-frozen"} if method == "hyperfl" else {}
    changes = {
        "target": "mlp",
        "num_rounds": 2,
        "fraction_train": 1 if noise == "sum" else 0.5,
        "privacy.delta": 1e-4,
        **embedding,
    }
    run = federate(method, NODES, **noisy(noise, **changes))
    crowds = {"server": [4, 8], "local": [1, 1], "sum": [3, 3]}[noise]
    assert [(line["round"], line["crowd"]) for line in lines(run)] == list(zip((1, 2), crowds, strict=True))
    entry = privacy_of(run)
    assert entry["epsilon"] == client_epsilon(Z, 2, 1e-4, noise)
    assert entry == entry | {
        "unit": "client", "delta": 1e-4, "noise_multiplier": Z, "clip_norm": C, "horizon": 2, "crowd": crowds[0],
        "reason": None,
    }  # fmt: skip
    assert "metrics and numbers of samples" in entry["not_covered"]
    stated = f"privacy: epsilon {entry['epsilon']:.2f} at delta 0.0001 of clients over 2 releases"
    assert stated in (run / "server.log").read_text()


def test_epsilon_is_the_known_one(federate: Federate) -> None:
    """Ten rounds with z = 1: 17.86 with noise from the server, 19.05 with noise in the sum."""
    quick: Settings = {"target": "mlp", "num_rounds": 10, "privacy.noise-multiplier": 1.0, "data.train-samples": 4}
    for noise, expected in (("server", 17.86), ("sum", 19.05)):
        assert privacy_of(federate("fedavg", 3, **noisy(noise, **quick)))["epsilon"] == pytest.approx(
            expected, abs=0.01
        )


@pytest.mark.parametrize("noise", ["server", "local", "sum"])
def test_a_round_that_is_repeated_counts_twice(noise: str, federate: Federate, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is killed after it has released round 2, and before it has stored it: the round gets other noise."""
    plan = noisy(noise, **{"target": "mlp", "num_rounds": 3, "checkpoint-every": 10})
    recorded = RecordedStrategy._record_training

    def killed(self: RecordedStrategy, current: int, seconds: float) -> None:
        if current == 2:
            raise KeyboardInterrupt
        recorded(self, current, seconds)

    folder = federate("fedavg", NODES, **plan).parent / "killed"
    with monkeypatch.context() as patch:
        patch.setattr(RecordedStrategy, "_record_training", killed)
        with pytest.raises(KeyboardInterrupt):
            federate("fedavg", NODES, **plan, output=str(folder))
    with (folder / "privacy.jsonl").open("a") as file:
        file.write('{"round": 2')  # of a line that was being written
    run = federate("fedavg", NODES, **plan, output="", resume=str(folder))
    assert [line["round"] for line in lines(run)] == [1, 2, 2, 3]
    entry = privacy_of(run)
    assert (entry["horizon"], entry["epsilon"]) == (4, client_epsilon(Z, 4, 1e-5, noise))


def test_a_resumed_run_continues_from_the_noisy_state(federate: Federate) -> None:
    """The checkpoint after every round is what the clients are sent, so that no round is released again."""
    plan = noisy("server", **{"target": "mlp", "checkpoint-every": 10})
    short = federate("fedavg", **plan, output="")
    before = exact(arrays_of(short))
    run = federate("fedavg", **plan | {"num_rounds": 2}, output="", resume=str(short))
    assert exact(last_checkpoint(run)[0]) != before
    assert [line["round"] for line in lines(run)] == [1, 2]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, "nothing is clipped, and no noise is added"),
        (
            {"privacy.clip-norm": 1.0, "privacy.noise-multiplier": 0.1},
            "without privacy.unit=client, clipping and noise",
        ),
        ({"privacy.clip-norm": 1.0, "privacy.unit": "client"}, "no noise is added"),
        ({"privacy.clip-norm": 1.0, "privacy.unit": "client", "privacy.noise-multiplier": 1e-4}, "the noise is too"),
    ],
)
def test_without_a_guarantee_epsilon_is_null_and_the_reason_is_given(
    changes: Settings, reason: str, federate: Federate
) -> None:
    run = federate("fedavg", num_rounds=1, target="mlp", **changes)
    entry = privacy_of(run)
    assert entry["epsilon"] is None
    assert entry["reason"].startswith(reason)
    assert entry["unit"] == changes.get("privacy.unit", "none")
    assert (run / "privacy.jsonl").exists() == ("privacy.unit" in changes)
    log = (run / "server.log").read_text()
    assert ("privacy: no epsilon" in log) == bool(changes)


class DyingGrid(InProcessGrid):
    """The processes of two nodes die in round 1 after they have uploaded; their messages are sent again."""

    def __init__(self, num_nodes: int, settings: Settings) -> None:
        super().__init__(app, num_nodes, settings, {"simulated": True})
        self.dying = {1001, 1002}

    def answer(self, message: Message) -> Message:
        reply = super().answer(message)
        if message.metadata.message_type == MessageType.TRAIN and message.metadata.dst_node_id in self.dying:
            self.dying.remove(message.metadata.dst_node_id)
            return Message(Error(code=ErrorCode.UNKNOWN, reason="died"), reply_to=message)
        return reply


@pytest.mark.parametrize(("noise", "rounds"), [("local", [1, 1, 2]), ("server", [1, 2]), ("sum", [1, 2])])
def test_an_upload_that_is_sent_again_counts(noise: str, rounds: list[int], federate: Federate) -> None:
    """No client uploads more than twice in the round. Noise on the sum is drawn once."""
    run = federate("fedavg", NODES, grid=DyingGrid, **noisy(noise, target="mlp", num_rounds=2))
    assert [line["round"] for line in lines(run)] == rounds
    assert privacy_of(run)["epsilon"] == client_epsilon(Z, len(rounds), 1e-5, noise)
    if noise == "local":
        record = read_record(run / "clients" / "privacy.jsonl")
        assert max(Counter(entry.client for entry in record).values()) == len(rounds)


@pytest.mark.parametrize("noise", ["local", "server"])
def test_an_upload_of_a_message_that_is_delivered_twice_is_not_covered(noise: str, federate: Federate) -> None:
    """The server does not know of it, the nodes do; noise on the sum is drawn once."""
    run = federate("fedavg", NODES, grid=RepeatingGrid, **noisy(noise, target="mlp"))
    entry = privacy_of(run)
    assert entry["horizon"] == 1
    assert any("delivered twice" in each for each in entry["not_covered"]) == (noise == "local")
    record = read_record(run / "clients" / "privacy.jsonl")
    assert set(Counter(line.client for line in record).values()) == {2}
