"""Trains a federation from a program: what `hyperfl run` does, with keyword arguments for its options."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from hyperfl_flwr.api.run import Run, absolute
from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.data.sample_format import is_local_data, local_data_path
from hyperfl_flwr.launch.console import err
from hyperfl_flwr.launch.follow import Display, Platform, RunCallbacks
from hyperfl_flwr.launch.plans import RAY, Engine
from hyperfl_flwr.launch.progress import ShownProgress
from hyperfl_flwr.launch.simulation import simulation

Progress = bool | RunCallbacks | Display
"""How a run is shown while it goes on, see `run`."""


def run(
    *,
    method: str | None = None,
    dataset: str | None = None,
    model: str | None = None,
    num_clients: int | None = None,
    num_rounds: int | None = None,
    seed: int | None = None,
    data_root: Path | str | None = None,
    output: Path | str | None = None,
    settings: Mapping[str, Scalar] | None = None,
    engine: Engine = RAY,
    num_nodes: int | None = None,
    deployment: Platform | None = None,
    tensorboard: bool = False,
    progress: Progress = True,
) -> Run:
    """Train a federation, simulated or on a deployment, and wait for its end.

    What is None is as by default (docs/reference/settings.md). Processes of their own check the settings and train;
    they are ended when an exception, Ctrl-C among them, leaves this function.

    Args:
        method: Name of the method.
        dataset: Name of the data set, `npz:FILE` or `folder:PATH`.
        model: The clients' network: a built-in target, or `package.module:factory`.
        num_clients: Number of clients N.
        num_rounds: Number of federated rounds.
        seed: Seed of everything but the partition (`data.seed`).
        data_root: Folder of the data sets; by default the user's cache folder.
        output: Folder of the run; by default a new one below `runs` in the working directory.
        settings: Any other settings by their keys, as in `{"data.partition": "dirichlet"}`. The arguments above go
            before settings of the same key.
        engine: Of a simulation: Flower's engine on Ray, or all nodes one after the other in one process.
        num_nodes: Number of simulated nodes P; by default what suits the machine.
        deployment: Where to run instead of in a simulation, see `hyperfl_flwr.deployment`.
        tensorboard: Whether TensorBoard's event files are written, too.
        progress: True shows the run on standard error, False only warnings of it; an `RunCallbacks` has functions that
            are called instead, in this thread.

    Returns:
        The finished run.

    Raises:
        ConfigError: Settings are unknown, of a wrong type or out of range; the message names all of them.
        RunFailedError: The run has started and failed; the message says how to resume it.
        HyperFLError: Data, device, folders or the installation do not allow the run.
        KeyboardInterrupt: The user has interrupted the run, which can be resumed.
    """
    changes = changed_settings(
        settings, method=method, dataset=dataset, target=model, num_clients=num_clients, num_rounds=num_rounds,
        seed=seed, data_root=data_root, output=output,
    )  # fmt: skip
    if tensorboard:
        from hyperfl_flwr.launch.tensorboard import require_tensorboard

        require_tensorboard()  # before anything is made
    if deployment is not None and (num_nodes is not None or engine != RAY):
        raise ConfigError("num_nodes and engine are for simulations; a deployment has its own nodes")
    ready = (deployment or simulation(num_nodes, engine))(changes)
    with (
        _display(progress)(ready.plan.method) as shown,
        _with_event_files(shown, ready.plan.directory, wanted=tensorboard) as observer,
    ):
        return Run(ready.launch(observer))


def resume(
    unfinished: Run | Path | str,
    *,
    num_rounds: int | None = None,
    data_root: Path | str | None = None,
    settings: Mapping[str, Scalar] | None = None,
    engine: Engine = RAY,
    num_nodes: int | None = None,
    deployment: Platform | None = None,
    tensorboard: bool = False,
    progress: Progress = True,
) -> Run:
    """Go on with a run from its last checkpoint; the result is what it would have been without a stop.

    Args:
        unfinished: The run, or its folder. It may be complete, if `num_rounds` is larger now.
        num_rounds: Number of federated rounds in all; it may only grow.
        data_root: Folder of the data sets, if it has changed.
        settings: Others that may change on a resumed run.
        engine: As for `run`, whatever the engine was before.
        num_nodes: As before, or None.
        deployment: As for `run`.
        tensorboard: As for `run`.
        progress: As for `run`.

    Returns:
        The finished run.

    Raises:
        HyperFLError: As for `run`, and if the run cannot be resumed with these settings.
    """
    return run(
        num_rounds=num_rounds,
        data_root=data_root,
        settings=changed_settings(settings, resume=unfinished.folder if isinstance(unfinished, Run) else unfinished),
        engine=engine,
        num_nodes=num_nodes,
        deployment=deployment,
        tensorboard=tensorboard,
        progress=progress,
    )


def changed_settings(settings: Mapping[str, Scalar] | None = None, **named: Scalar | Path | None) -> dict[str, Scalar]:
    """Return settings by their keys, with absolute paths.

    Args:
        settings: By their keys.
        **named: Those that go before, with underscores in the place of hyphens; None is left out.

    Raises:
        ConfigError: If a value is not a text, a number or a truth value.
    """
    given: dict[str, Any] = {name.replace("_", "-"): value for name, value in named.items() if value is not None}
    for key in {"data-root", "output", "resume"} & given.keys():
        given[key] = str(absolute(given[key]))
    changes = {**(settings or {}), **given}
    for key, value in changes.items():
        if not isinstance(value, str | int | float | bool):  # a table would be lost among the defaults
            raise ConfigError(
                f"the setting {key} must be a text, a number or a truth value, got {value!r}; settings of a section "
                f"have a dot in their key, as in data.partition"
            )
    if isinstance(own := changes.get("dataset"), str) and is_local_data(own):
        path = local_data_path(own)
        if path.exists() or not changes.get("data-root"):  # otherwise it is looked up there
            changes["dataset"] = f"{own.partition(':')[0]}:{path.absolute()}"
    return changes


def _display(progress: Progress) -> Display:
    """Return what shows a run; where no terminal is, in a notebook too, each round gets a line."""
    if isinstance(progress, RunCallbacks):
        return lambda _: nullcontext(progress)
    if isinstance(progress, bool):
        return partial(ShownProgress, quiet=not progress, rounds=err.is_jupyter or not err.is_terminal)
    return progress


def _with_event_files(observer: RunCallbacks, directory: Path, *, wanted: bool) -> AbstractContextManager[RunCallbacks]:
    """Return what a run is observed by, and written down for TensorBoard if that is wanted."""
    if not wanted:
        return nullcontext(observer)
    from hyperfl_flwr.launch.tensorboard import written_along  # with torch, whose writer it takes

    return written_along(directory, observer)
