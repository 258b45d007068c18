"""Novel clients that fail, and resuming a run to assess them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_novel import NOVEL, PLAN

from hyperfl_flwr.contract.base import Federate
from hyperfl_flwr.contract.folders import metrics
from hyperfl_flwr.core.errors import RunDirectoryError, RunFailedError
from hyperfl_flwr.data.federated_data import ClientData, FederatedData
from hyperfl_flwr.runs.novel_results import read_novel
from hyperfl_flwr.runs.run_directory import read_manifest


def test_a_failing_novel_client_is_named_and_the_others_go_on(
    federate: Federate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Client 6 lacks samples for one descriptor and is left out; if all novel clients fail, the run can be resumed."""
    client_data = FederatedData.client

    def small(self: FederatedData, client: int, device: object = "cpu") -> ClientData:
        data = client_data(self, client)
        return replace(data, train_images=data.train_images[:10]) if client == 6 else data

    with monkeypatch.context() as patch:
        patch.setattr(FederatedData, "client", small)
        run = federate("it-pfl", **PLAN, **{"novel.samples": "all,20"})
    assert [(record.client, record.samples) for record in read_novel(run)] == [(5, 40), (6, 10), (5, 20)]
    reason = "client 6 is left out: ValueError: has 10 training samples, but the query is about 20"
    assert reason in (run / "server.log").read_text()
    assert (run / "failures" / "round-000001-novel-client-00006.txt").is_file()

    def gone(self: FederatedData, client: int, device: object = "cpu") -> ClientData:
        if client in NOVEL:
            raise RuntimeError("the camera is broken")
        return client_data(self, client)

    output = str(run.parent / "run-111")
    with monkeypatch.context() as patch:
        patch.setattr(FederatedData, "client", gone)
        with pytest.raises(RunFailedError, match="no novel client could be assessed"):
            federate("it-pfl", output=output, **PLAN)
    assert not (Path(output) / "novel.json").exists()
    resumed = federate("it-pfl", output=output, resume=output, **PLAN)
    assert read_manifest(resumed)["status"] == "completed"
    assert [(record.client, record.samples) for record in read_novel(resumed)] == [(5, 40), (6, 40)]
    assert not list((resumed / "failures").iterdir())


def test_a_complete_run_is_resumed_to_assess_in_another_way(federate: Federate) -> None:
    """Rounds are not repeated, and novel.json equals that of a run with these settings from the start."""
    run = federate("it-pfl", **PLAN)
    again: dict[str, Any] = {"resume": str(run), "output": str(run)}
    seconds = [json.loads(line).get("seconds") for line in (run / "metrics.jsonl").read_text().splitlines()]
    before = read_novel(run)
    with pytest.raises(RunDirectoryError, match="is complete after 1 rounds"):
        federate("it-pfl", **PLAN, **again)
    with pytest.raises(RunDirectoryError, match=r"novel\.clients was 2, now 3"):
        federate("it-pfl", **PLAN | {"novel.clients": 3}, **again)
    (run / "novel.json").unlink()
    federate("it-pfl", **PLAN, **again)
    assert read_novel(run) == before
    straight = federate("it-pfl", **PLAN, **{"novel.samples": "all,5"})
    federate("it-pfl", **PLAN, **again, **{"novel.samples": "all,5"})
    assert read_novel(run) == read_novel(straight) != before
    assert read_manifest(run)["settings"]["novel.samples"] == "all,5"
    assert [json.loads(line).get("seconds") for line in (run / "metrics.jsonl").read_text().splitlines()] == seconds
    assert metrics(run) == metrics(straight)
