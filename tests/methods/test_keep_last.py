"""HyperFL without the generated weights of the last round: what is still the same, and what is then not known."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.config.table import default_settings
from hyperfl_flwr.contract.base import NUM_CLIENTS, Federate
from hyperfl_flwr.contract.folders import exact, last_checkpoint, metrics, outcome, private_arrays
from hyperfl_flwr.contract.grids import KilledError, KilledGrid
from hyperfl_flwr.core.errors import RunDirectoryError
from hyperfl_flwr.methods.hyperfl import HyperFLConfig
from hyperfl_flwr.results.export import model_of_run
from hyperfl_flwr.results.report import write_report
from hyperfl_flwr.runs.run_directory import read_manifest

OFF: dict[str, Any] = {"hyperfl.keep-last": False}


@pytest.mark.parametrize(
    ("setting", "num_clients", "keeps"),
    [("auto", 1000, True), ("auto", 1001, False), (True, 1001, True), (False, 2, False)],
)
def test_auto_depends_on_the_number_of_clients(setting: bool | str, num_clients: int, keeps: bool) -> None:
    config = RunConfig.from_flat(default_settings() | {"hyperfl.keep-last": setting})
    assert config.section(HyperFLConfig).keeps_last(num_clients) == keeps


def without_change(run: Path) -> list[dict[str, Any]]:
    """Return a run's metrics without the change of theta and the bytes of its messages."""
    dropped = ("theta_change", "bytes_on_wire")
    return [{key: value for key, value in row.items() if key not in dropped} for row in metrics(run)]


def test_the_training_is_the_same_bit_for_bit(federate: Federate) -> None:
    """Only `last/theta` and `theta_change` are missing; the log and the page say so."""
    kept, off = federate("hyperfl", num_rounds=3), federate("hyperfl", num_rounds=3, **OFF)
    assert exact(last_checkpoint(off)[0]) == exact(last_checkpoint(kept)[0])
    assert without_change(off) == without_change(kept)
    assert ["theta_change" in (run / "metrics.jsonl").read_text() for run in (kept, off)] == [True, False]
    before, after = private_arrays(kept), private_arrays(off)
    for name, arrays in before.items():
        assert arrays.pop("last/theta").size > 1000
        assert exact(after[name]) == exact(arrays)
    assert "warning: hyperfl.keep-last is false, so theta_change is not measured" in (off / "server.log").read_text()
    assert "hyperfl.keep-last is false" not in (kept / "server.log").read_text()
    assert [read_manifest(run)["resolved"].get("hyperfl.keep-last") for run in (kept, off)] == [True, None]
    sizes = [json.loads((run / "summary.json").read_text())["client_state_bytes"] for run in (kept, off)]
    assert sizes[1] < sizes[0] / 10
    assert "never leave the node: embedding, classifier." in write_report(off).read_text().replace("\n", " ")


def test_a_killed_run_goes_on(federate: Federate) -> None:
    plan: dict[str, Any] = {"num_rounds": 4, "fraction_train": 0.5, "checkpoint_every": 2, **OFF}
    straight = federate("hyperfl", **plan)
    killed = straight.parent / "run-993"
    with pytest.raises(KilledError):
        federate("hyperfl", grid=partial(KilledGrid, in_round=4), **plan, output=str(killed))
    assert outcome(federate("hyperfl", **plan, output=str(killed), resume=str(killed))) == outcome(straight)


def test_a_state_with_the_weights_is_read_without_them(federate: Federate) -> None:
    """A run of an earlier version with many clients has kept them; it goes on with `auto`, which is off for so many."""
    straight, early = federate("hyperfl", num_rounds=3, **OFF), federate("hyperfl", num_rounds=2)
    manifest = read_manifest(early)
    del manifest["resolved"]["hyperfl.keep-last"], manifest["settings"]["hyperfl.keep-last"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hyperfl_flwr.methods.hyperfl.KEPT_UP_TO", NUM_CLIENTS - 1)
        (early / "manifest.json").write_text(json.dumps(manifest))
        resumed = federate("hyperfl", num_rounds=3, resume=str(early))
        assert exact(last_checkpoint(resumed)[0]) == exact(last_checkpoint(straight)[0])
        newest = {name: arrays for name, arrays in private_arrays(resumed).items() if "round-000003" in name}
        assert len(newest) == NUM_CLIENTS
        assert not any("last/theta" in arrays for arrays in newest.values())


def test_only_the_received_model_can_be_exported(federate: Federate) -> None:
    run = federate("hyperfl", **OFF)
    text = "after local training: hyperfl.keep-last was false, so that only a SuperNode keeps it; leave out --state"
    with pytest.raises(RunDirectoryError, match=text):
        model_of_run(run, 0, "personalized")
    found = model_of_run(run, 0)
    assert (found.state, found.score) == ("aggregate", model_of_run(run, 0, "aggregate").score)
