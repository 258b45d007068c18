"""`hyperfl check-method` finds what a method breaks, and says what to do."""

import json
import sys
from pathlib import Path

import pytest
from federations import Call

from hyperfl_flwr.contract.check import CHECKS, CHOSEN, check_method, federations, finding_of
from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.launch.findings import Finding, Level

pytestmark = pytest.mark.usefixtures("imports_as_before")

SUBJECTS = {check.subject: check for check in CHECKS}


@pytest.mark.parametrize("name", ["fedrep", "own_method:CLIPPED"])
def test_a_sound_method_holds_all_of_it(name: str, tmp_path: Path) -> None:
    findings = {each.subject: each.level for each in check_method(name, {}, tmp_path / "runs")}
    assert list(findings)[: len(CHECKS)] == list(SUBJECTS)
    assert set(findings.values()) - {Level.WARNING} == {Level.OK}
    assert ("private groups" in findings) == (name != "fedrep")
    assert len(list((tmp_path / "runs").iterdir())) > len(CHECKS)


def finding(subject: str, name: str, folder: Path) -> Finding:
    """Return what one part of the contract finds."""
    return finding_of(SUBJECTS[subject], f"broken_methods:{name}", federations(folder, {}))


BROKEN = {
    "UNRESOLVED": ("settings", "nothing replaces the `auto` of clipped.server-share"),
    "UNDECLARED_UPLOAD": ("uploads", "the client shares model, which `uploads` does not name"),
    "WRONG_UPLOAD": ("uploads", "the client shares model, which `uploads` does not name"),
    "LEAVING": ("results", "SystemExit"),
    "HISTORY": ("resume", "a run killed in round 4 and resumed differs in arrays"),
    "MEMORY": ("processes", "nodes in processes of their own change arrays"),
    "NO_LOSS": ("results", "client 0 reported no finite train-loss in round 1"),
    "COUNTING": ("repeatability", "two runs with one seed differ in arrays"),
    "SEEDLESS": ("seed", "another seed gives the same arrays"),
    "FORGETFUL": ("resume", "a run killed in round 4 and resumed differs in arrays"),
    "ALL_OR_NOTHING": ("failures", "a client is missing"),
    "NEEDING_MEANS": ("failures", "a round in which all clients fail ends the run: KeyError: 'model/"),
    "TOO_FEW": ("client sampling", "four rounds trained [1, 1, 1, 4] clients of 5"),
    "REPORTING": ("privacy", "a private number was reported as a metric"),
    "TELLING": (
        "privacy",
        "private arrays left the client: client-00000/round-000002.npz:classifier/weight in debug-0.bin",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_each_part_of_the_contract_can_fail(name: str, tmp_path: Path) -> None:
    subject, text = BROKEN[name]
    found = finding(subject, name, tmp_path)
    assert found.level == Level.ERROR
    assert text in found.text
    assert found.remedy


def test_every_check_has_a_method_that_breaks_it() -> None:
    assert {subject for subject, _ in BROKEN.values()} | {"repeated messages"} == set(SUBJECTS)


def test_a_counting_client_is_found_by_repeated_messages(tmp_path: Path) -> None:
    found = finding("repeated messages", "COUNTING", tmp_path)
    assert found.level == Level.ERROR
    assert "answered with two different replies" in found.text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("FAILING_CLIENT", "client 0 failed in round 1: ZeroDivisionError: in the client"),
        ("FAILING_STRATEGY", "ZeroDivisionError: in the strategy"),
    ],
)
def test_an_error_of_the_method_itself_is_shown_once(name: str, text: str, capfd: pytest.CaptureFixture[str]) -> None:
    """All checks would find the same, and the folder that has the traceback is deleted."""
    findings = {each.subject: each for each in check_method(f"broken_methods:{name}", {})}
    assert list(findings) == ["settings", "uploads", "results", "other checks", "private groups"]
    assert findings["results"].level == Level.ERROR
    assert findings["results"].text.startswith(text)
    assert f"{len(CHECKS) - 3} were skipped" in findings["other checks"].text
    shown = capfd.readouterr().err
    assert shown.count("Traceback") == 1
    assert "broken_methods.py" in shown


def test_a_rule_that_is_broken_keeps_no_other_check_from_running() -> None:
    findings = {each.subject: each.level for each in check_method("broken_methods:NO_LOSS", {})}
    assert findings["results"] == Level.ERROR
    assert "other checks" not in findings
    assert set(SUBJECTS) <= set(findings)


def test_the_command_prints_findings_and_its_exit_code(call: Call) -> None:
    code, out, _ = call("check-method", "broken_methods:UNDECLARED_UPLOAD", "--json")
    assert code == 1
    assert {each["subject"]: each["level"] for each in json.loads(out)}["uploads"] == "error"
    assert not list(Path.cwd().iterdir())


@pytest.mark.parametrize("key", CHOSEN)
def test_settings_that_the_checks_choose_are_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} cannot be set here"):
        next(check_method("fedavg", {key: 1}))


def test_unknown_methods_and_wrong_settings_are_refused(call: Call) -> None:
    code, _, err = call("check-method", "fedavgg")
    assert (code, "did you mean fedavg?" in err) == (2, True)
    code, _, err = call("check-method", "fedavg", "--set", "batch-size=0")
    assert (code, "batch-size must be greater than 0" in err) == (2, True)
    assert "nowhere_at_all" not in sys.modules
    code, _, err = call("check-method", "nowhere_at_all:METHOD")
    assert (code, "no module nowhere_at_all" in err) == (2, True)
    code, _, err = call("check-method", "mine")
    assert (code, "no method 'mine'; for a method of your own write mine:METHOD" in " ".join(err.split())) == (2, True)
