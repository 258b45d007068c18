"""IT-PFL-HN's two phases in a run's outputs, and resuming within each phase and across their boundary."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hyperfl_flwr.contract.base import Federate
from hyperfl_flwr.contract.folders import metrics, outcome
from hyperfl_flwr.contract.grids import KilledError, KilledGrid
from hyperfl_flwr.runs.checkpoint import Checkpoints


def test_the_phases_are_seen_in_log_metrics_and_checkpoint(federate: Federate) -> None:
    """Of five rounds, the last two fine-tune; the encoder's loss is reported only while the encoder is trained."""
    run = federate("it-pfl", num_rounds=5, checkpoint_every=5, **{"it-pfl.fine-tune-rounds": 2})
    rounds = [row for row in metrics(run) if row["kind"] == "train"]
    assert [row["phase"] for row in rounds] == ["embeddings"] * 3 + ["fine-tuning"] * 2
    for name in ("encoder_loss", "embedding_distance"):
        assert [row.get(name, 0) > 0 for row in rounds] == [True] * 3 + [False] * 2
    log = (run / "server.log").read_text()
    assert "the phase fine-tuning begins with round 4 of 5" in log
    assert "round 3/5 (embeddings): personalized accuracy" in log
    assert "round 5/5 (fine-tuning): personalized accuracy" in log
    checkpoints = Checkpoints(run / "checkpoints")
    assert checkpoints.rounds() == [3, 5]  # a phase ends with a checkpoint
    stages = [checkpoints.load(number)[1] for number in (3, 5)]
    assert [(stage.phase, stage.last_phase_after) for stage in stages] == [("embeddings", None), ("fine-tuning", 3)]


def test_a_run_without_a_round_for_the_encoder_is_warned(federate: Federate) -> None:
    run = federate("it-pfl", num_rounds=1, **{"it-pfl.fine-tune-rounds": 1})
    text = "warning: it-pfl.fine-tune-rounds = 1 leaves none of num-rounds = 1 to train the encoder"
    assert text in (run / "server.log").read_text()


@pytest.mark.parametrize("checkpoint_every", [1, 10])
@pytest.mark.parametrize("in_round", [2, 4, 5])
def test_a_run_that_is_killed_in_either_phase_goes_on(in_round: int, checkpoint_every: int, federate: Federate) -> None:
    """Killed in the first phase or in either round of the second, a resumed run equals a straight one."""
    plan: dict[str, Any] = {"num_rounds": 5, "fraction_train": 0.5, "checkpoint_every": checkpoint_every}
    plan |= {"it-pfl.fine-tune-rounds": 2, "target": "mlp"}
    straight = federate("it-pfl", **plan)
    plan["output"] = str(straight.parent / "run-111")
    with pytest.raises(KilledError):
        federate("it-pfl", grid=partial(KilledGrid, in_round=in_round), **plan)
    killed = straight.parent / "run-111"
    newest = max(Checkpoints(killed / "checkpoints").rounds(), default=0)
    assert newest == (in_round - 1 if checkpoint_every == 1 else {2: 0, 4: 3, 5: 4}[in_round])
    assert outcome(federate("it-pfl", resume=str(killed), **plan)) == outcome(straight)


def test_a_prolonged_run_goes_on_from_the_end_of_the_first_phase(federate: Federate) -> None:
    """Prolonged from five to six rounds, a run keeps rounds 1 and 2 and ends like a straight run of six."""
    plan: dict[str, Any] = {"checkpoint_every": 1, "it-pfl.fine-tune-rounds": 3, "target": "mlp"}
    short = federate("it-pfl", num_rounds=5, **plan)
    assert Checkpoints(short / "checkpoints").rounds() == [2, 4, 5]
    times = {row["round"]: row["seconds"] for row in timed(short)}
    long = federate("it-pfl", num_rounds=6, resume=str(short), **plan)
    assert [row["seconds"] == times[row["round"]] for row in timed(long) if row["round"] <= 5] == [True] * 2 + [
        False
    ] * 3
    assert outcome(long) == outcome(federate("it-pfl", num_rounds=6, **plan))


def test_a_run_that_is_resumed_from_its_beginning_forgets_its_checkpoints(
    federate: Federate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of the second phase alone has no round in common with a longer one: its checkpoints 2 and 4 are deleted.

    Otherwise the new checkpoint of round 1 would count as the oldest, and be deleted instead.
    """
    plan: dict[str, Any] = {"it-pfl.fine-tune-rounds": 4, "target": "mlp"}
    run = federate("it-pfl", num_rounds=4, checkpoint_every=2, **plan)
    assert Checkpoints(run / "checkpoints").rounds() == [2, 4]
    save, kept = Checkpoints.save, []

    def spied(self: Checkpoints, arrays: Any, progress: Any) -> None:
        save(self, arrays, progress)
        kept.append(self.rounds())

    monkeypatch.setattr(Checkpoints, "save", spied)
    federate("it-pfl", num_rounds=5, checkpoint_every=1, resume=str(run), **plan)
    assert kept[:3] == [[1], [1, 2], [1, 2, 3]]


def timed(run: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == "train"]
