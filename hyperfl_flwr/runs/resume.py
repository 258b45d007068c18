"""Resume a run: check which settings differ, and choose the checkpoint."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.config.table import default_settings, resumable_changes
from hyperfl_flwr.core.errors import RunDirectoryError, StateError
from hyperfl_flwr.core.plurals import counted
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.node.private_state import INITIAL, PrivateState
from hyperfl_flwr.runs.checkpoint import Checkpoints, Progress
from hyperfl_flwr.runs.novel_results import FILE
from hyperfl_flwr.runs.run_directory import is_simulation, read_manifest, read_metrics, trained_settings
from hyperfl_flwr.runs.validation import is_over, over_text


def resume_round(config: RunConfig, in_use: RunConfig, *, keeps_state: bool) -> int:
    """Return the round after which to continue; 0 to start from the beginning.

    Args:
        config: The settings of the resumed run; `config.resume` is its folder.
        in_use: The same settings with numbers instead of `auto`, see `hyperfl_flwr.app.resolved`.
        keeps_state: True if the clients' nodes store something of them.

    Raises:
        RunDirectoryError: If the folder is not a run folder, a setting differs that must not, or nothing is left to do.
        StateError: If the checkpoint, the private state that it needs, or a round's records are missing or damaged.
    """
    path = Path(config.resume)
    manifest = read_manifest(path)
    refuse_changes(trained_settings(manifest), config.flat(), in_use.flat())
    checkpoints = Checkpoints(path / "checkpoints")
    if manifest.get("status") == "completed" and not _is_to_assess(path, manifest["settings"], config):
        _refuse_complete(path, checkpoints, config)
    for number in reversed(checkpoints.rounds()):  # the newest suitable checkpoint
        _, progress = checkpoints.load(number)
        if _fits(progress, config):
            if keeps_state and is_simulation(manifest):
                _check_states(path / "clients", str(manifest["experiment"]), progress)
            _check_rounds(path, number)
            return number
    return 0


def _check_rounds(path: Path, last: int) -> None:
    """Check that all rounds up to the checkpoint are recorded, of which the summary will be."""
    recorded = {record["round"] for record in read_metrics(path) if record["kind"] == "train"}
    if missing := sorted(set(range(1, last + 1)) - recorded):
        raise StateError(
            f"{path}/metrics.jsonl lacks {counted(len(missing), 'round')} up to the checkpoint of round {last}, the "
            f"first is {missing[0]}; restore the file, or start a new run"
        )


def _refuse_complete(path: Path, checkpoints: Checkpoints, config: RunConfig) -> None:
    """Refuse to resume a complete run in which no round is left to train."""
    if not (rounds := checkpoints.rounds()):
        raise RunDirectoryError(
            f"the run in {path} is complete, but has no checkpoint to continue it from; start a new run"
        )
    _, progress = checkpoints.load(rounds[-1])
    if config.num_rounds <= progress.round:
        raise RunDirectoryError(
            f"the run in {path} is complete after {progress.round} rounds; raise num-rounds to continue it"
        )
    if is_over(progress, config.early_stopping):
        raise RunDirectoryError(
            f"the run in {path} is complete: {over_text(progress, config)}; raise early-stopping to continue it"
        )


def begun_rounds(path: Path, manifest: Mapping[str, Any]) -> int:
    """Return the number of rounds that a run may have begun, of which the last one need not be recorded.

    A complete run, which may have ended early, has recorded all of its rounds.

    Args:
        path: The run's folder.
        manifest: Its manifest.
    """
    recorded = max((record["round"] for record in read_metrics(path) if record["kind"] == "train"), default=0)
    if manifest.get("status") == "completed":
        return recorded
    return min(recorded + 1, int(manifest["settings"]["num-rounds"]))


def _is_to_assess(path: Path, settings: Mapping[str, Scalar], config: RunConfig) -> bool:
    """Return True if there are novel clients to assess: novel.json is missing, or a setting `novel.*` has changed."""
    if not config.novel.clients:
        return False
    before, now = (
        {key: value for key, value in flat.items() if key.startswith("novel.")}
        for flat in ({**default_settings(), **settings}, config.flat())
    )
    return before != now or not (path / FILE).is_file()


def _fits(progress: Progress, config: RunConfig) -> bool:
    """Return True if a run with settings `config` would have reached the same checkpoint.

    A checkpoint may depend on the number of rounds in two ways. With client sampling, the last round trains all
    clients (unless `last-round = sampled`), where another round trains a sample. And the last phase begins a fixed
    number of rounds before the end.
    """
    trains_share = config.fraction_train < 1 and config.last_round == "all"
    was_last = trains_share and progress.round == progress.num_rounds
    depends_on_end = was_last or progress.last_phase_after is not None
    return not depends_on_end or progress.num_rounds == config.num_rounds


def _check_states(directory: Path, experiment: str, progress: Progress) -> None:
    """Check that a simulation's private state exists and is intact; the nodes of a deployment check theirs."""
    for client, version in progress.versions.items():
        if version != INITIAL:
            PrivateState(directory, experiment, client).load(version)


def refuse_other_nodes(manifest: Mapping[str, Any], num_nodes: int) -> None:
    """Check that a resumed run has as many nodes as before.

    Raises:
        RunDirectoryError: If the number of nodes differs.
    """
    if (before := len(manifest["nodes"])) != num_nodes:
        raise RunDirectoryError(
            f"a resumed run must have as many nodes as before ({before}), got {num_nodes}; leave out num-nodes"
        )


def refuse_changes(old: Mapping[str, Scalar], new: Mapping[str, Any], in_use: Mapping[str, Any]) -> None:
    """Check that a resumed run has the same settings as before, except those that may change.

    A setting that an earlier version did not have counts as its default.

    Args:
        old: The settings that the run was trained with.
        new: The requested settings of the resumed run.
        in_use: The same settings with numbers instead of `auto`.

    Raises:
        RunDirectoryError: If settings differ that must not; the message names all of them.
    """
    method = str(new["method"])
    old, may_change = {**default_settings(method), **old}, resumable_changes(method)
    # `old` has numbers instead of `auto`, so a setting may match as requested or after `auto` is replaced.
    problems = [
        f"{key} was {old.get(key)!r}, now {in_use.get(key)!r}"
        for key in sorted(set(old) | set(new))
        if old.get(key) not in (new.get(key), in_use.get(key)) and key not in may_change
    ]
    if int(new["num-rounds"]) < int(old["num-rounds"]):
        problems.append(f"num-rounds was {old['num-rounds']}, now {new['num-rounds']}; it may only grow")
    if "auto" not in (old["num-nodes"], new["num-nodes"]) and old["num-nodes"] != new["num-nodes"]:
        problems.append(
            f"num-nodes was {old['num-nodes']}, now {new['num-nodes']}; it may be auto, for as many nodes as before"
        )
    if bool(old["early-stopping"]) != bool(new["early-stopping"]) and old["keep"] == new["keep"] == "last":
        problems.append(
            f"early-stopping was {old['early-stopping']}, now {new['early-stopping']}; it may change, but not to or "
            f"from 0, since accuracies are measured on validation data if it is 0, and on test data otherwise"
        )
    if new["dp.epsilon"] and int(new["num-rounds"]) > int(old["num-rounds"]):
        problems.append(
            f"num-rounds was {old['num-rounds']}, now {new['num-rounds']}; with dp.epsilon it must stay, since the "
            f"noise of all steps was computed for that number of rounds"
        )
    if problems:
        raise RunDirectoryError(
            "a resumed run must keep the settings that affect its results; start a new run, or revert:\n"
            + "\n".join(f"  - {problem}" for problem in problems)
        )
