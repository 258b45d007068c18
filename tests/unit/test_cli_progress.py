"""The lines of the server's log that `hyperfl run` shows: the operator's, all with --verbose, warnings with --quiet."""

import pytest

from hyperfl_flwr.launch.console import err, out
from hyperfl_flwr.launch.core_locks import WAITING
from hyperfl_flwr.launch.progress import ShownProgress

LOG = """\
INFO :      Starting the app
INFO :      waiting for nodes: 1 of 2 present, missing: 1
INFO :      node 1 runs torch 1.0 (here 2.0): results may differ
INFO :      node 0 takes part: clients 0
INFO :      round 1/2: personalized accuracy 0.5000, 2 of 2 clients, 8.0 s, nodes 0 1
INFO :      round 1 took 8.0 s, in which a client trained for at most 0.5 s; a client received 59.8 MB and sent 59.8 MB
INFO :      node 1 is away (clients 1)
INFO :      the nodes' data would agree with --set data.classes=a,b
INFO :      warning: client 3 has few samples
INFO :      round 2: client 1 is left out: StateError, see the node's log
WARNING :   something of Flower's own
"""
LINES = [
    "waiting for", "node 1 runs", "node 0 takes part", "round 1/2", "round 1 took", "node 1 is away", "agree with",
    "warning:", "is left out",
]  # fmt: skip


@pytest.mark.parametrize(
    ("ways", "expected"),
    [
        ({"rounds": True}, LINES),
        ({}, [text for text in LINES if text != "round 1/2"]),  # a simulation's progress bar shows the rounds
        ({"quiet": True, "rounds": True}, ["warning:", "is left out"]),
    ],
)
def test_an_operator_sees_a_line_for_each_thing(
    ways: dict[str, bool], expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with ShownProgress("hyperfl", **ways) as observer:
        observer.on_log(LOG)
    shown = [line for line in capsys.readouterr().err.splitlines() if line.strip() and "starting" not in line]
    assert [text for line, text in zip(shown, expected, strict=True) if text not in line] == []
    assert not any("INFO" in line for line in shown)


def test_a_path_with_the_code_of_an_emoji_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    for console in (out, err):
        console.print("/tmp/e:on:1/r0", markup=False)
    with ShownProgress("hyperfl") as observer:
        observer.on_note("/tmp/e:on:1/r1")
    printed = capsys.readouterr()
    assert "/tmp/e:on:1/r0" in printed.out
    assert all(f"/tmp/e:on:1/{name}" in printed.err for name in ("r0", "r1"))


def test_verbose_shows_the_log_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    with ShownProgress("hyperfl", verbose=True) as observer:
        observer.on_log(LOG)
    shown = capsys.readouterr().err.splitlines()
    assert [line for line in LOG.splitlines() if line.rstrip() not in [each.rstrip() for each in shown]] == []


def test_runs_in_turn_show_what_they_have_in_common_once(capsys: pytest.CaptureFixture[str]) -> None:
    """But that a run waits for a core is said of each."""
    noted: set[str] = set()
    for name in ("hyperfl", "fedavg"):
        with ShownProgress(name, noted=noted) as observer:
            for note in ("data: 8 samples", f"method {name}", WAITING):
                observer.on_note(note)
    shown = " ".join(capsys.readouterr().err.split())  # a terminal breaks long lines
    notes = ("data: 8 samples", "method hyperfl", "method fedavg", WAITING)
    assert [shown.count(note) for note in notes] == [1, 1, 1, 2]


def test_a_run_shows_the_notes_that_another_has_shown(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        with ShownProgress("hyperfl") as observer:
            observer.on_note("data: 8 samples")
    assert capsys.readouterr().err.count("data: 8 samples") == 2
