"""Train a federation from Python: the command `hyperfl run` as a function."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

from hyperfl_flwr.api.run import Run
from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.launch.console import err
from hyperfl_flwr.launch.follow import Display, Platform, RunCallbacks
from hyperfl_flwr.launch.given_settings import changed_settings, plain_scalar
from hyperfl_flwr.launch.plans import AUTO, Engine
from hyperfl_flwr.launch.progress import ShownProgress
from hyperfl_flwr.launch.simulation import simulation

Progress = bool | RunCallbacks | Display
"""Progress display of a run, see `run`."""


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
    engine: Engine = AUTO,
    num_nodes: int | None = None,
    ray_address: str | None = None,
    deployment: Platform | None = None,
    tensorboard: bool = False,
    track: str = "",
    progress: Progress = True,
) -> Run:
    """Train a federation, simulated or on a deployment, and wait for its end.

    Arguments that are None have the defaults of docs/reference/settings.md. Separate processes check the settings and
    train; they are terminated if an exception, including KeyboardInterrupt, leaves this function.

    Args:
        method: Name of the method.
        dataset: Name of the data set, `npz:FILE`, `csv:FILE` or `folder:PATH`.
        model: The clients' network, the setting `target`: a built-in one, or `package.module:factory`.
        num_clients: Number of clients N.
        num_rounds: Number of federated rounds.
        seed: Seed of everything but the partition (`data.seed`).
        data_root: Folder of the data sets; by default the user's cache folder.
        output: Folder of the run; by default a new one below `runs` in the working directory.
        settings: Any other settings by their keys, as in `{"data.partition": "dirichlet"}`. The arguments above
            override settings of the same key.
        engine: Engine of a simulation: "ray", Flower's; "in-process", all nodes one after the other in one process; or
            "auto", whichever is likely to end sooner.
        num_nodes: Number of simulated nodes P; by default what suits the machine or cluster.
        ray_address: HOST:PORT of a running Ray cluster, on all hosts of which a simulation trains.
        deployment: The deployment to run on instead of a simulation, see `hyperfl_flwr.deployment`.
        tensorboard: Whether to also write TensorBoard's event files.
        track: Service that also receives the numbers, `mlflow` or `wandb`; empty for none.
        progress: True shows the run on standard error, False only its warnings; the functions of a `RunCallbacks` are
            called instead, in this thread.

    Returns:
        The finished run.

    Raises:
        ConfigError: If settings are unknown, of a wrong type or out of range; the message names all of them.
        RunFailedError: If the run started and failed; the message says how to resume it.
        HyperFLError: If data, device, folders or the installation do not allow the run.
        KeyboardInterrupt: If the user interrupted the run, which can be resumed.
    """
    num_nodes = _checked_nodes(num_nodes)
    changes = changed_settings(
        settings, method=method, dataset=dataset, target=model, num_clients=num_clients, num_rounds=num_rounds,
        seed=seed, data_root=data_root, output=output,
    )  # fmt: skip
    if tensorboard:
        from hyperfl_flwr.launch.tensorboard import require_tensorboard

        require_tensorboard()  # before any file is written
    if track:
        from hyperfl_flwr.launch.trackers import require_tracker

        require_tracker(track)
    if deployment is not None and (num_nodes is not None or engine != AUTO or ray_address is not None):
        raise ConfigError("num_nodes, engine and ray_address are for simulations; a deployment has its own nodes")
    with (
        (deployment or simulation(num_nodes, engine, ray_address))(changes) as ready,
        _display(progress)(ready.plan.method) as shown,
        _with_event_files(shown, ready.plan.directory, enabled=tensorboard) as also_written,
        _with_tracker(also_written, ready.plan.directory, track) as observer,
    ):
        return Run(ready.launch(observer))


def resume(
    unfinished: Run | Path | str,
    *,
    num_rounds: int | None = None,
    data_root: Path | str | None = None,
    settings: Mapping[str, Scalar] | None = None,
    engine: Engine = AUTO,
    num_nodes: int | None = None,
    ray_address: str | None = None,
    deployment: Platform | None = None,
    tensorboard: bool = False,
    track: str = "",
    progress: Progress = True,
) -> Run:
    """Continue a run from its last checkpoint; the result is the same as without the interruption.

    Args:
        unfinished: The run, or its folder. A complete run can be continued with a larger `num_rounds`.
        num_rounds: Total number of federated rounds; it may only grow.
        data_root: Folder of the data sets, if it has changed.
        settings: Further settings that a resumed run may change.
        engine: As for `run`; may differ from the engine before.
        num_nodes: Number of simulated nodes as before, or None.
        ray_address: As for `run`; may differ from the cluster before.
        deployment: As for `run`.
        tensorboard: As for `run`.
        track: As for `run`.
        progress: As for `run`.

    Returns:
        The finished run.

    Raises:
        HyperFLError: As for `run`, and if the run cannot be resumed with these settings.
    """
    return run(
        num_rounds=num_rounds,
        data_root=data_root,
        settings=changed_settings(settings, resume=unfinished),
        engine=engine,
        num_nodes=num_nodes,
        ray_address=ray_address,
        deployment=deployment,
        tensorboard=tensorboard,
        track=track,
        progress=progress,
    )


def _checked_nodes(num_nodes: object) -> int | None:
    """Return the number of simulated nodes as an int.

    Raises:
        ConfigError: If it is neither None nor a whole number of at least 1.
    """
    found = plain_scalar(num_nodes)
    if found is None or (isinstance(found, int) and not isinstance(found, bool) and found >= 1):
        return found
    raise ConfigError(
        f"num_nodes must be a whole number of at least 1, got {found!r}; None takes as many nodes as suit the machine"
    )


def _display(progress: Progress) -> Display:
    """Return the display of a run; without a terminal, and in a notebook, it prints a line for each round."""
    if isinstance(progress, RunCallbacks):
        return lambda _: nullcontext(progress)
    if isinstance(progress, bool):
        return partial(ShownProgress, quiet=not progress, rounds=err.is_jupyter or not err.is_terminal)
    return progress


def _with_event_files(
    observer: RunCallbacks, directory: Path, *, enabled: bool
) -> AbstractContextManager[RunCallbacks]:
    """Return the run's callbacks, extended by a writer of TensorBoard's event files if `enabled`."""
    if not enabled:
        return nullcontext(observer)
    from hyperfl_flwr.launch.tensorboard import write_during_run  # deferred: imports torch

    return write_during_run(directory, observer)


def _with_tracker(observer: RunCallbacks, directory: Path, name: str) -> AbstractContextManager[RunCallbacks]:
    """Return the run's callbacks, extended by what sends its numbers to a service, if one is named."""
    if not name:
        return nullcontext(observer)
    from hyperfl_flwr.launch.trackers import track_during_run

    return track_during_run(directory, name, observer)
