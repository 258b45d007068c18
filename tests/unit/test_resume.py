"""Resuming a run: from which checkpoints, and with which changes of the settings."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from hyperfl_flwr.app.resolved import resolved
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.config.table import default_settings, resumable_changes
from hyperfl_flwr.contract.base import Federate
from hyperfl_flwr.contract.folders import last_checkpoint
from hyperfl_flwr.contract.grids import Settings
from hyperfl_flwr.core.errors import (
    DIVERGES_AGAIN,
    DivergedError,
    HyperFLError,
    RunDirectoryError,
    RunFailedError,
    StateError,
)
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.launch.follow import RunCallbacks, with_resume_hint
from hyperfl_flwr.launch.plans import Plan
from hyperfl_flwr.runs.resume import begun_rounds, refuse_changes, resume_round
from hyperfl_flwr.runs.run_directory import RunDirectory, read_manifest, read_metrics, settings_of

Resume = Callable[..., int]


@pytest.fixture
def finished(federate: Federate) -> Path:
    """Return the folder of a run of two rounds with checkpoints after both."""
    return federate("hyperfl", num_rounds=2, checkpoint_every=1)


@pytest.fixture
def resume(make_settings: Callable[..., Settings], finished: Path) -> Resume:
    def ask(**changes: Scalar) -> int:
        plan: Settings = {"num_rounds": 4, "checkpoint_every": 1, "resume": str(finished)} | changes
        config = RunConfig.from_flat(make_settings("hyperfl", **plan))
        return resume_round(config, resolved(config), keeps_state=True)

    return ask


ALLOWED: Settings = {
    "checkpoint-every": 9, "data-root": "/data", "device": "auto", "early-stopping": 9, "exclusion-rounds": 9,
    "failure-budget": 0.5,
    "ledger": True, "lpm.weights": "/weights.pth",
    "max-failed-rounds": 9, "max-update-ratio": 9.0, "min-nodes": 9, "node-timeout": 1.0,
    "num-nodes": 9,
    "novel.a-distance-learning-rate": 9.0, "novel.a-distance-rounds": 9,
    "novel.corruptions": "blur", "novel.delta": 0.5, "novel.epsilons": "9", "novel.samples": "9",
    "num-rounds": 99, "output": "/elsewhere", "resume": "/here", "round-timeout": 1.0, "target-accuracy": 0.5,
    "threads": 4,
}  # fmt: skip


def another(value: Scalar) -> Scalar:
    """Return a different value."""
    return f"{value}-other" if isinstance(value, str) else value + 1


def refuse(old: Settings, new: Settings) -> None:
    """Compare settings as if no `auto` had been resolved to a number."""
    refuse_changes(old, new, new)


@pytest.mark.parametrize("key", [key for key in default_settings() if key not in resumable_changes()])
def test_every_setting_that_decides_the_result_must_stay(key: str) -> None:
    old = default_settings()
    with pytest.raises(RunDirectoryError, match=f"  - {key} was {old[key]!r}, now {another(old[key])!r}"):
        refuse(old, old | {key: another(old[key])})


def test_settings_that_do_not_decide_the_result_may_change() -> None:
    old = default_settings() | {"early-stopping": 2, "data.validation-fraction": 0.5}
    assert ALLOWED.keys() == resumable_changes()
    refuse(old, old | ALLOWED)
    refuse(old, old)
    with pytest.raises(RunDirectoryError, match="early-stopping was 2, now 0; it may change, but not to or from 0"):
        refuse(old, old | {"early-stopping": 0})
    for before, now in ((9, "auto"), ("auto", 9), (9, 9)):
        refuse(old | {"num-nodes": before}, old | {"num-nodes": now})
    with pytest.raises(RunDirectoryError, match="num-nodes was 2, now 3; it may be auto, for as many nodes as before"):
        refuse(old | {"num-nodes": 2}, old | {"num-nodes": 3})


def test_all_changes_are_told_together() -> None:
    """Three changes and fewer rounds; settings that an older version did not have count as the defaults."""
    old = default_settings()
    new = old | {"seed": 5, "method": "local", "num-rounds": 3, "momentum": 0.25}
    del old["momentum"], old["weight-decay"]
    with pytest.raises(RunDirectoryError) as caught:
        refuse(old, new)
    lines = str(caught.value).splitlines()[1:]
    assert lines == [
        "  - method was 'hyperfl', now 'local'",
        "  - momentum was 0.5, now 0.25",
        "  - seed was 0, now 5",
        "  - num-rounds was 10, now 3; it may only grow",
    ]


def test_noise_that_was_computed_for_the_rounds_allows_no_more_of_them() -> None:
    old = default_settings() | {"dp.epsilon": 1.0}
    refuse(old, old)
    with pytest.raises(RunDirectoryError, match=r"num-rounds was 10, now 11; with dp\.epsilon it must stay"):
        refuse(old, old | {"num-rounds": 11})


def test_it_goes_on_after_the_newest_checkpoint(resume: Resume) -> None:
    assert resume() == 2


def test_changes_are_refused_before_anything_is_touched(resume: Resume, finished: Path) -> None:
    before = (finished / "manifest.json").read_bytes()
    with pytest.raises(RunDirectoryError, match=r"seed was 0, now 7"):
        resume(seed=7)
    assert (finished / "manifest.json").read_bytes() == before


def test_a_completed_run_has_nothing_left_to_do(resume: Resume) -> None:
    with pytest.raises(RunDirectoryError, match="complete after 2 rounds; raise num-rounds"):
        resume(num_rounds=2)
    with pytest.raises(RunDirectoryError, match="may only grow"):
        resume(num_rounds=1)


def test_a_folder_that_is_no_run(resume: Resume, tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="is not a run's folder"):
        resume(resume=str(tmp_path))


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-40], lambda data: b"", lambda data: data.replace(b"\x3d", b"\x3e")]
)
def test_a_damaged_checkpoint_is_told(resume: Resume, finished: Path, damage: Callable[[bytes], bytes]) -> None:
    path = finished / "checkpoints" / "round-000002.npz"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(StateError, match=r"round-000002\.npz is damaged"):
        resume()


def test_a_checkpoint_whose_number_is_not_its_content(resume: Resume, finished: Path) -> None:
    """The file of round 1 under the name of round 2 is refused, as it would make the run skip a round."""
    checkpoints = finished / "checkpoints"
    (checkpoints / "round-000001.npz").replace(checkpoints / "round-000002.npz")
    with pytest.raises(StateError, match=r"round-000002\.npz"):
        resume()


def test_missing_or_damaged_private_state_is_told(resume: Resume, finished: Path) -> None:
    path = finished / "clients" / "client-00003" / "round-000002.npz"
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(StateError, match=r"client-00003/round-000002\.npz is damaged"):
        resume()
    path.unlink()
    with pytest.raises(StateError, match=r"client-00003/round-000002\.npz is missing"):
        resume()
    path.parent.joinpath("round-000001.npz").unlink()
    path.parent.rmdir()
    with pytest.raises(StateError, match="client-00003"):
        resume()


def test_missing_private_state_of_the_first_round_is_told(resume: Resume, finished: Path) -> None:
    """Only a client that was never trained has none."""
    (finished / "checkpoints" / "round-000002.npz").unlink()
    assert resume() == 1
    (finished / "clients" / "client-00003" / "round-000001.npz").unlink()
    with pytest.raises(StateError, match=r"client-00003/round-000001\.npz is missing"):
        resume()


def test_a_run_of_before_a_setting_was_renamed_goes_on(federate: Federate, finished: Path) -> None:
    """Manifests have all settings, those of other methods, too."""
    file = finished / "manifest.json"
    assert "ppsgd.classifier-learning-rate" in read_manifest(finished)["settings"]
    file.write_text(file.read_text().replace("ppsgd.classifier-learning-rate", "ppsgd.head-learning-rate"))
    assert "ppsgd.classifier-learning-rate" in read_manifest(finished)["settings"]
    federate("hyperfl", num_rounds=3, checkpoint_every=1, resume=str(finished))
    assert last_checkpoint(finished)[1].round == 3


def test_a_run_whose_records_are_gone_does_not_go_on(federate: Federate, finished: Path) -> None:
    """Its summary would be of the rounds that are left; nothing in its folder is changed."""
    file = finished / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    for kept, reason in (
        ([], "lacks 2 rounds up to the checkpoint of round 2, the first is 1; restore the file"),
        ([line for line in lines if '"train", "round": 2' not in line], "lacks 1 round up .*, the first is 2"),
    ):
        assert len(kept) < len(lines)
        file.write_text("".join(kept))
        before = (finished / "manifest.json").read_bytes()
        with pytest.raises(StateError, match=reason):
            federate("hyperfl", num_rounds=3, checkpoint_every=1, resume=str(finished))
        assert (file.read_text(), (finished / "manifest.json").read_bytes()) == ("".join(kept), before)
    file.write_text("".join(lines))
    federate("hyperfl", num_rounds=3, checkpoint_every=1, resume=str(finished))


def test_a_run_whose_private_state_is_gone_does_not_go_on(federate: Federate, finished: Path) -> None:
    """It ends with an error, and must not continue from initial private parameters."""
    for path in sorted((finished / "clients").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    with pytest.raises(HyperFLError, match="is missing"):
        federate("hyperfl", num_rounds=3, checkpoint_every=1, resume=str(finished))
    assert last_checkpoint(finished)[1].round == 2


def test_a_run_that_somebody_is_writing_to_is_left_alone(federate: Federate, finished: Path) -> None:
    before = (finished / "manifest.json").read_bytes()
    writer = RunDirectory(finished)
    try:
        with pytest.raises(RunDirectoryError, match="another process is writing"):
            federate("hyperfl", num_rounds=3, checkpoint_every=1, resume=str(finished))
    finally:
        writer.close()
    assert (finished / "manifest.json").read_bytes() == before


def test_the_manifest_tells_of_the_resumption(federate: Federate, finished: Path) -> None:
    """Start and identity stay, the settings are the new ones, and every round occurs once in the metrics."""
    old = read_manifest(finished)
    federate("hyperfl", num_rounds=3, checkpoint_every=1, resume=str(finished))
    new = read_manifest(finished)
    assert (new["start"], new["experiment"]) == (old["start"], old["experiment"])
    assert len(new["resumed"]) == 1
    assert (new["status"], new["settings"]["num-rounds"]) == ("completed", 3)
    assert [row["round"] for row in read_metrics(finished) if row["kind"] == "train"] == [1, 2, 3]
    assert [row["round"] for row in read_metrics(finished) if row["kind"] == "aggregate"] == [0, 1, 2, 3]


def test_only_a_run_that_was_interrupted_may_have_begun_another_round(finished: Path) -> None:
    """A run that ended early has recorded all of its rounds; it had 2 of 4 here."""
    manifest = read_manifest(finished)
    manifest["settings"]["num-rounds"] = 4
    begun = {
        status: begun_rounds(finished, manifest | {"status": status}) for status in ("completed", "failed", "stopped")
    }
    assert begun == {"completed": 2, "failed": 3, "stopped": 3}
    assert begun_rounds(finished, manifest | {"status": "running"}) == 3  # it was killed
    manifest["settings"]["num-rounds"] = 2
    assert begun_rounds(finished, manifest | {"status": "failed"}) == 2  # in its evaluation


def test_the_printed_command_has_what_the_manifest_lacks(finished: Path) -> None:
    """A resumed run can end before its manifest has the new settings, for example on a full disk."""
    same = settings_of(finished) | {"resume": str(finished)}
    changes: Settings = {"num-rounds": 9, "data-root": "/my data", "ledger": True, "novel.epsilons": "9"}
    told = []
    for settings in (same, same | changes):
        with pytest.raises(RunFailedError) as caught, with_resume_hint(Plan(settings=settings), RunCallbacks()):
            raise RunFailedError(f"no space left\nresume with: hyperfl run --resume {finished}")
        told.append(str(caught.value).splitlines())
    assert [lines[0] for lines in told] == ["no space left"] * 2
    assert told[0][-1] == f"resume with: hyperfl run --resume {finished}"
    words = shlex.split(told[1][-1].removeprefix(told[0][-1]))
    assert set(zip(words[::2], words[1::2], strict=True)) == {
        ("--num-rounds", "9"), ("--data-root", "/my data"), ("--set", "ledger=true"), ("--set", 'novel.epsilons="9"'),
    }  # fmt: skip


def test_no_run_that_has_diverged_is_to_be_resumed(federate: Federate, finished: Path) -> None:
    """The server says so, and the command in the place of its own hint."""
    with pytest.raises(DivergedError, match="is not finite after training") as caught:
        federate("fedavg", learning_rate=1e30, local_epochs=3)
    assert str(caught.value).splitlines()[-1] == DIVERGES_AGAIN
    assert "resume with" not in str(caught.value)
    document = read_manifest(finished)
    for diverged in (True, False):
        (finished / "manifest.json").write_text(json.dumps(document | {"status": "failed", "diverged": diverged}))
        plan = Plan(settings=settings_of(finished) | {"resume": str(finished)})
        with pytest.raises(RunFailedError) as caught, with_resume_hint(plan, RunCallbacks()):
            raise RunFailedError(f"all clients failed\n{DIVERGES_AGAIN}" if diverged else "all clients failed")
        assert str(caught.value).count(DIVERGES_AGAIN) == int(diverged)
        assert ("resume with" in str(caught.value)) is not diverged
    (finished / "manifest.json").write_text("{")
    with pytest.raises(RunFailedError, match=r"^all clients failed\n"), with_resume_hint(plan, RunCallbacks()):
        raise RunFailedError("all clients failed")


def test_the_manifest_still_tells_who_was_excluded_and_who_came_late(federate: Federate, finished: Path) -> None:
    """Exclusions end when the run is resumed, since it asks all nodes again: here after 2 rounds."""
    entry = {"node": 1, "round": 1, "times": 1, "reason": "no report"}
    told = [{**entry, "until": None}, {**entry, "node": 0, "until": 1}]
    document = read_manifest(finished) | {"excluded": told, "joined": [1], "present_at_start": [0]}
    (finished / "manifest.json").write_text(json.dumps(document))
    for last in (3, 4):
        federate("hyperfl", num_rounds=last, checkpoint_every=1, resume=str(finished))
        new = read_manifest(finished)
        assert new["excluded"] == [{**entry, "until": 2}, {**entry, "node": 0, "until": 1}]
        assert new["joined"] == [1]
