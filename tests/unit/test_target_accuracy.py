"""Rounds to a target accuracy: in summary.json, on the run's page, and in the last lines of `hyperfl run`."""

import json
from pathlib import Path
from typing import Any

import pytest
from html_pages import Page

from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.config.table import default_settings
from hyperfl_flwr.contract.base import Federate
from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.launch.progress import ShownProgress
from hyperfl_flwr.results.report import write_report
from hyperfl_flwr.runs.summary import summarise
from hyperfl_flwr.runs.target_accuracy import target_text

PERSONALIZED = {1: 0.5, 2: 0.75, 3: 0.7, 4: 0.9}
"""Mean personalized accuracy of the round."""

AGGREGATE = {0: 0.1, 1: 0.6, 2: 0.74, 3: 0.8, 4: 0.6}
"""Mean accuracy of the global state after the round."""


def rounds_to_target(run: Path) -> tuple[int | None, int | None]:
    summary = json.loads((run / "summary.json").read_text())
    return summary["rounds_to_target"], summary["rounds_to_target_aggregate"]


@pytest.fixture
def known(federate: Federate) -> Path:
    """Return the folder of a run of four rounds with the accuracies above, and the target 75 %."""
    run = federate("fedavg", num_rounds=4, target_accuracy=0.75)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for record in records:
        if record["kind"] == "train":
            record["personalized_accuracy"] = PERSONALIZED[record["round"]]
        if record["kind"] == "aggregate":
            record["aggregate_accuracy"] = AGGREGATE[record["round"]]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return run


def with_target(run: Path, target: float | str) -> dict[str, Any]:
    """Return the summary of a run as if it had had another target."""
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["settings"]["target-accuracy"] = target
    (run / "manifest.json").write_text(json.dumps(manifest))
    return summarise(run)


@pytest.mark.parametrize(
    ("target", "personalized", "aggregate"),
    [(0.75, 2, 3), (0.74, 2, 2), (0.85, 4, None), (0.1, 1, 0), (1.0, None, None), (0.0, None, None)],
)
def test_the_first_round_that_reaches_the_target(
    known: Path, target: float, personalized: int | None, aggregate: int | None
) -> None:
    """A later round below the target changes nothing; the initial state is round 0; a target of 0 is none."""
    summary = with_target(known, target)
    assert (summary["rounds_to_target"], summary["rounds_to_target_aggregate"]) == (personalized, aggregate)


def test_several_targets_have_numbers_of_their_own(known: Path) -> None:
    """The plain names are of the highest; the run's page and its log have all, in ascending order.

    Names have all digits of a target: two that are nearly equal differ.
    """
    summary = with_target(known, "0.85,0.74")
    assert {name: value for name, value in summary.items() if name.startswith("rounds_to_target")} == {
        "rounds_to_target": 4, "rounds_to_target_aggregate": None,
        "rounds_to_target_0.74": 2, "rounds_to_target_0.74_aggregate": 2,
        "rounds_to_target_0.85": 4, "rounds_to_target_0.85_aggregate": None,
    }  # fmt: skip
    assert with_target(known, 0.85)["rounds_to_target_0.85"] == 4
    near = with_target(known, "0.75000001,0.75000002")
    assert {"rounds_to_target_0.75000001", "rounds_to_target_0.75000002"} < near.keys()
    with_target(known, "0.85,0.74")
    rows = Page(write_report(known).read_text()).rows
    assert [(name, value) for name, value in rows.items() if name.startswith("first round")] == [
        ("first round with a mean personalized accuracy of 74 %", "2"),
        ("first round with a mean aggregate accuracy of 74 %", "2"),
        ("first round with a mean personalized accuracy of 85 %", "4"),
        ("first round with a mean aggregate accuracy of 85 %", "none"),
    ]
    assert target_text({"target-accuracy": "0.85,0.74"}, summary) == (
        "personalized accuracy reached 74 % in round 2; aggregate accuracy reached 74 % in round 2; "
        "personalized accuracy reached 85 % in round 4; aggregate accuracy reached 85 % in no round"
    )


def test_runs_of_earlier_versions_have_no_target(known: Path) -> None:
    manifest = json.loads((known / "manifest.json").read_text())
    del manifest["settings"]["target-accuracy"]
    (known / "manifest.json").write_text(json.dumps(manifest))
    assert summarise(known)["rounds_to_target"] is None


def test_the_page_has_the_rounds(known: Path) -> None:
    rows = Page(write_report(known).read_text()).rows
    assert rows["first round with a mean personalized accuracy of 75 %"] == "2"
    assert rows["first round with a mean aggregate accuracy of 75 %"] == "3"
    with_target(known, 0.85)
    rows = Page(write_report(known).read_text()).rows
    assert rows["first round with a mean aggregate accuracy of 85 %"] == "none"
    with_target(known, 0.0)
    assert not [row for row in Page(write_report(known).read_text()).rows if row.startswith("first round")]


def test_a_resumed_run_counts_all_its_rounds(federate: Federate, capsys: pytest.CaptureFixture[str]) -> None:
    """A target that the resumed run sets first is also looked for in the rounds before; `hyperfl run` shows it."""
    run = federate("fedavg", num_rounds=2)
    assert rounds_to_target(run) == (None, None)
    assert "target-accuracy" not in (run / "server.log").read_text()
    federate("fedavg", num_rounds=3, resume=str(run), output="", target_accuracy=0.01)
    assert rounds_to_target(run) == (1, 0)
    (line,) = [line for line in (run / "server.log").read_text().splitlines() if "target-accuracy" in line]
    expected = "personalized accuracy reached 1 % in round 1; aggregate accuracy reached 1 % in round 0"
    assert line.endswith(f"target-accuracy: {expected}")
    capsys.readouterr()
    with ShownProgress("hyperfl") as observer:
        observer.on_log(f"INFO :      target-accuracy: {expected}\n")
    assert expected in " ".join(capsys.readouterr().err.split())


def test_a_target_is_a_share(federate: Federate) -> None:
    with pytest.raises(ConfigError, match=r"^target-accuracy must be a number in \[0, 1\], or several .*; got 80\.0$"):
        federate("fedavg", target_accuracy=80.0)


@pytest.mark.parametrize("given", ["0.5,80", "0,0.5", "0.5,", "", "0.5,0.50", "0.5;0.6", "nan", "0.5,1.01", -0.1, 1.5])
def test_several_targets_are_shares(given: str | float) -> None:
    with pytest.raises(ConfigError, match=rf"target-accuracy must be a number in .*between them; got {given!r}$"):
        RunConfig.from_flat({**default_settings(), "target-accuracy": given})
