"""`hyperfl dp` and `hyperfl dp-audit`: known answers, what they print, and wrong combinations of options."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from federations import Call

from hyperfl_flwr.core.errors import RefusalError
from hyperfl_flwr.privacy.budget import FILE, PrivacyBudget, epsilon_of
from hyperfl_flwr.privacy.release import Release

RECORD = ("dp", "--samples", "600", "--batch", "50")
CLIENT = ("dp", "--unit", "client", "--rounds", "10")


def answer(call: Call, *words: object) -> dict[str, float | None]:
    code, out, err = call(*words, "--json")
    assert (code, err) == (0, "")
    found: dict[str, float | None] = json.loads(out)
    assert list(found) == ["epsilon", "delta", "noise_multiplier"]
    return found


@pytest.mark.parametrize(("steps", "expected"), [(600, 2.367), (1200, 3.24), (12000, 9.92)])
def test_the_noise_for_records(call: Call, steps: int, expected: float) -> None:
    found = answer(call, *RECORD, "--epsilon", 4, "--delta", "1e-5", "--steps", steps)
    assert found["noise_multiplier"] == pytest.approx(expected, abs=0.01)
    back = answer(call, *RECORD, "--noise-multiplier", found["noise_multiplier"], "--steps", steps)
    assert back == found | {"epsilon": pytest.approx(4, abs=0.001)}


@pytest.mark.parametrize(("noise", "expected"), [("server", 17.86), ("local", 17.86), ("sum", 19.05)])
def test_the_epsilon_of_clients(call: Call, noise: str, expected: float) -> None:
    found = answer(call, *CLIENT, "--noise-multiplier", 1, "--noise", noise)
    assert found["epsilon"] == pytest.approx(expected, abs=0.005)
    back = answer(call, *CLIENT, "--epsilon", found["epsilon"], "--noise", noise)
    assert back["noise_multiplier"] == pytest.approx(1, abs=1e-3)


def test_no_noise_has_no_epsilon(call: Call) -> None:
    assert answer(call, *CLIENT, "--noise-multiplier", 0, "--noise", "sum")["epsilon"] is None
    _, out, _ = call(*RECORD, "--noise-multiplier", 0, "--steps", 1)
    assert "epsilon           infinite" in out


def test_the_text_says_what_the_epsilon_means(call: Call) -> None:
    code, out, _ = call(*RECORD, "--epsilon", 4, "--steps", 600)
    assert code == 0
    first, *others = out.splitlines()
    assert first == "noise multiplier  2.367"
    assert [line[:18].strip() for line in others] == [
        "epsilon", "delta", "unit", "holds", "horizon", "accountant", "central limit", "not covered",
    ]  # fmt: skip
    for text in (
        "present or without effect; the number of records is public",
        "rounds that are repeated",
        "600 steps",
        "sample rate 0.08333",
        "metrics and numbers of samples; who takes part, failures and times",
    ):
        assert text in out
    _, out, _ = call(*CLIENT, "--noise-multiplier", 1, "--noise", "server")
    for text in ("17.86", "all that a client contributes", "all but the server", "10 rounds", "analytic Gaussian"):
        assert text in out
    trusted = {"server": "what the server sees", "sum": "more colluding nodes", "local": "own personalized model"}
    for noise, text in trusted.items():
        _, out, _ = call(*CLIENT, "--noise-multiplier", 1, "--noise", noise)
        (line,) = [line for line in out.splitlines() if line.startswith("not covered")]
        for each in (
            text,
            "metrics and numbers of samples; who takes part, failures and times",
            "rounds that are repeated",
            "own personalized model",
        ):
            assert each in line


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--epsilon", 4), "--unit record also needs --samples, --batch, --steps"),
        ((), "give either --epsilon or --noise-multiplier; the other one is computed"),
        (("--epsilon", 4, "--noise-multiplier", 1), "give either --epsilon or --noise-multiplier"),
        (("--unit", "client", "--epsilon", 4), "--unit client also needs --rounds, --noise"),
        (("--unit", "client", "--epsilon", 4, "--steps", 3), "--steps cannot be given with --unit client"),
        (("--epsilon", 4, "--noise", "sum"), "--noise cannot be given with --unit record"),
        (("--unit", "house", "--epsilon", 4), "--unit must be record or client, got 'house'"),
        ((*RECORD[1:], "--steps", 0, "--epsilon", 4), "must be at least 1, got 600, 50 and 0"),
        ((*RECORD[1:], "--steps", 6, "--epsilon", -4), "epsilon must be above 0"),
        (
            (*RECORD[1:], "--steps", 6, "--epsilon", 4, "--delta", 0.2),
            "--delta must be above 0 and at most 0.1, got 0.2",
        ),
        ((*RECORD[1:], "--steps", 6, "--epsilon", 501), "epsilon must be above 0 and at most 500, got 501"),
        (("--spent", "x", "--delta", 0), "--delta must be above 0 and at most 0.1, got 0"),
        ((*RECORD[1:], "--steps", 6, "--noise-multiplier", -1), "noise multiplier must be at least 0"),
        ((*CLIENT[1:], "--noise", "here", "--epsilon", 4), "--noise must be server, sum or local, got 'here'"),
        ((*CLIENT[1:3], "--rounds", 0, "--noise", "sum", "--epsilon", 4), "--rounds must be at least 1, got 0"),
        (("--spent", "x", "--epsilon", 4), "--epsilon cannot be given with --spent; leave one of them out"),
        (("--spent", "gone"), "cannot be read: No such file or directory; give the privacy.jsonl"),
    ],
)
def test_dp_refuses_wrong_combinations(call: Call, words: tuple[object, ...], reason: str) -> None:
    code, out, err = call("dp", *words)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert reason in err


def test_what_a_node_has_spent_under_several_numbers(call: Call, tmp_path: Path) -> None:
    """An owner's file is the same data under each: the budget counts all releases, and the last row has them."""
    upload = Release(unit="client", mechanism="gaussian", noise_multiplier=2.0)
    for client in (0, 3):
        spending = PrivacyBudget(path=tmp_path / FILE, experiment="aaaa", client=client, is_only_client=True)
        for number in range(5):
            spending.spend(number + 1, upload)
    code, out, _ = call("dp", "--spent", tmp_path / FILE)
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if "│" in line]
    assert code == 0
    assert cells[-1][:3] == ["all, if the same data", "all runs", "10"]
    assert (cells[1][4], cells[-1][4]) == ("4.983", "7.511")
    limited = replace(spending, max_epsilon=7.6)
    with pytest.raises(RefusalError, match=r"for one client to .*: the 10 earlier ones have spent 7\.511"):
        limited.spend(6, upload)
    of_record = epsilon_of([upload] * 10, "record", 1e-5)
    assert of_record > 7.6
    with pytest.raises(RefusalError, match=rf"for one record to .*: the 10 earlier ones have spent {of_record:.4g}"):
        limited.spend(6, Release(unit="record", mechanism="gaussian", noise_multiplier=50.0))


def test_dp_spent_adds_up_each_client_s_releases(call: Call, tmp_path: Path) -> None:
    steps = Release(unit="record", mechanism="sampled-gaussian", noise_multiplier=2.367, sample_rate=50 / 600, steps=60)
    upload = Release(unit="client", mechanism="gaussian", noise_multiplier=1.0)
    descriptor = Release(unit="record", mechanism="gaussian", noise_multiplier=4.0, neighbours="replace-one")
    for client, experiment, release, count in [
        (0, "aaaa", steps, 10), (1, "aaaa", upload, 10), (2, "aaaa", None, 1), (2, "bbbb", descriptor, 1)
    ]:  # fmt: skip
        for number in range(count):
            PrivacyBudget(path=tmp_path / FILE, experiment=experiment, client=client).spend(number + 1, release)
    code, out, err = call("dp", "--spent", tmp_path / FILE)
    assert (code, err) == (0, "")
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if "│" in line]
    assert cells[:5] == [
        ["0", "aaaa", "10", "4", "infinite", "client"], ["0", "all runs", "10", "4", "infinite", "client"],
        ["1", "aaaa", "10", cells[2][3], "17.86", "client"], ["1", "all runs", "10", cells[3][3], "17.86", "client"],
        ["2", "aaaa", "1", "infinite", "infinite", "nothing"],
    ]  # fmt: skip
    for text in (
        "largest of single clients: infinite",
        "delta 1e-05",
        "descriptors: one record replaced",
        "not covered",
    ):
        assert text in out
    code, out, _ = call("dp", "--spent", tmp_path / FILE, "--delta", "1e-6", "--json")
    document = json.loads(out)
    assert document["delta"] == 1e-6
    assert [row["releases"] for row in document["spent"]] == [10, 10, 10, 10, 1, 1, 2, 22]
    assert document["spent"][-1]["client"] is None
    assert document["spent"][0]["client_epsilon"] is None


GAME = ("dp-audit", "--canaries", 400, "--batch", 400, "--steps", 20)


def test_dp_audit_refutes_only_an_epsilon_of_too_little_noise(call: Call) -> None:
    """80 guesses refute at most an epsilon of 3; epsilon 2 needs fewer than 5 wrong ones.

    With the noise as stated, 29 % are wrong; fewer than 5 have a probability of 7e-8. With a tenth none is.
    """
    code, out, err = call(*GAME, "--epsilon", 2, "--json")
    assert (code, err) == (0, "")
    honest = json.loads(out)
    assert honest["lower_bound"] < 2 < 2.5 < honest["largest_bound"] < 3.5
    assert (honest["canaries"], honest["guesses"], honest["refuted"]) == (400, 80, False)
    code, out, _ = call(*GAME, "--epsilon", 2, "--break", "noise")
    assert code == 1
    assert "divided by 10" in out
    assert "refuted: the noise or its accounting is wrong" in out


def test_a_membership_game_of_clients(call: Call) -> None:
    words = ("dp-audit", "--unit", "client", "--canaries", 400, "--rounds", 2, "--epsilon", 2)
    code, out, err = call(*words, "--noise", "server", "--json")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert (document["unit"], document["rounds"], document["guesses"], document["refuted"]) == ("client", 2, 80, False)
    code, out, _ = call(*words, "--break", "noise")
    assert code == 1
    assert "for one client, noise multiplier" in out
    assert "400 canaries, 2 rounds," in out


def test_a_game_that_could_not_refute_is_marked(call: Call) -> None:
    code, out, err = call(*GAME, "--epsilon", 5)
    assert code == 0
    assert "not refuted" in out
    assert "warning: with 400 canaries the bound is at most" in err


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--break", "clip"), "--break must be noise, got 'clip'"),
        (("--confidence", 1), "--confidence must be above 0 and below 1"),
        (("--canaries", 5), "at least 10 canaries"),
        (("--batch", 0), "--canaries and --batch must be at least 1"),
        (("--unit", "device"), "--unit must be record or client, got 'device'"),
        (("--unit", "client", "--steps", 1), "--steps cannot be given with --unit client"),
        (("--rounds", 1), "--rounds cannot be given with --unit record"),
        (("--unit", "client", "--noise", "node"), "--noise must be server, sum or local, got 'node'"),
        (("--unit", "client", "--rounds", 0), "number of rounds must be at least 1"),
        (("--steps", 0), "number of steps must be at least 1"),
        (("--epsilon", 0), "epsilon must be above 0"),
    ],
)
def test_dp_audit_refuses_wrong_games(call: Call, words: tuple[object, ...], reason: str) -> None:
    code, out, err = call("dp-audit", *words)
    assert (code, out) == (2, "")
    assert reason in err
