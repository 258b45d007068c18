"""Contract tests for all methods: results, repeatability, and independence of node names and of other clients."""

import functools
import itertools
import json
import math
import stat
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from federations import REPRESENTATIVES, of_every_method, of_representatives

from hyperfl_flwr.app.methods import client_of
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.contract.base import NUM_CLIENTS, Federate, MakeGrid
from hyperfl_flwr.contract.folders import last_checkpoint, private_arrays
from hyperfl_flwr.contract.grids import ForgetfulGrid, Settings, plain_grid
from hyperfl_flwr.contract.results import (
    check_repeatable,
    check_repeated_messages,
    check_results,
    check_sampling,
    check_seed,
    check_uploads,
)
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.data.federated_data import load_federated_data
from hyperfl_flwr.methods import METHODS
from hyperfl_flwr.protocol.messages import Reduction, group_of
from hyperfl_flwr.runs.checkpoint import SERVER
from hyperfl_flwr.runs.run_directory import read_manifest, read_metrics, settings_of

SUMMARY = {
    "method", "dataset", "num_clients", "num_nodes", "rounds", "test_accuracy", "test_accuracy_aggregate",
    "test_accuracy_worst", "test_accuracy_worst_decile", "test_accuracy_std", "test_accuracy_per_client",
    "rounds_to_target", "rounds_to_target_aggregate", "seconds_per_round", "bytes_up_per_client_round",
    "bytes_down_per_client_round", "bytes_on_wire_per_round",
    "server_state_bytes", "client_state_bytes", "peak_memory_mb", "privacy",
}  # fmt: skip


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


class Once:
    """Runs federations, but one with the usual settings a single time for each method; tests only read the folder.

    All folders have names of one length, since the messages contain them and their sizes are metrics.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._numbers = folder, itertools.count()
        self._usual: dict[str, Path] = {}

    def run(self, federate: Federate, method: str, grid: MakeGrid = plain_grid, **changes: Scalar) -> Path:
        is_usual = grid is plain_grid and not changes
        if is_usual and method in self._usual:
            return self._usual[method]
        output = str(self._folder / f"run-{next(self._numbers):03d}")
        run = federate(method, grid=grid, plots=method in REPRESENTATIVES and is_usual, output=output, **changes)
        if is_usual:
            self._usual[method] = run
        return run


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Once:
    return Once(tmp_path_factory.mktemp("once"))


@pytest.fixture
def once(federate: Federate, finished: Once) -> Federate:
    """Return `federate` without repetitions of the usual run."""
    return functools.partial(finished.run, federate)


def test_the_representatives_have_every_reduction() -> None:
    """Tests of the engine that run with them alone see all kinds of groups."""

    def reductions(methods: Iterable[str]) -> set[Reduction]:
        return {reduction for method in methods for reduction in client_of(method).shared.values()}

    assert reductions(REPRESENTATIVES) == reductions(METHODS)


@of_every_method
def test_two_rounds_leave_a_complete_run_folder(method: str, once: Federate) -> None:
    """The summary has all promised fields and consistent values, and every logged number is finite."""
    run = once(method)
    summary = json.loads((run / "summary.json").read_text())
    assert summary.keys() >= SUMMARY
    assert (summary["method"], summary["dataset"], summary["rounds"]) == (method, "digits", 2)
    assert (summary["num_clients"], summary["num_nodes"]) == (NUM_CLIENTS, 2)
    own = summary["test_accuracy_per_client"]
    assert len(own) == NUM_CLIENTS
    assert all(0 <= accuracy <= 1 for accuracy in (*own, summary["test_accuracy_aggregate"]))
    assert summary["test_accuracy"] == pytest.approx(sum(own) / NUM_CLIENTS)
    assert summary["test_accuracy_worst"] == summary["test_accuracy_worst_decile"] == min(own)  # one of five clients
    assert summary["test_accuracy_std"] == pytest.approx(np.std(own))
    assert summary["seconds_per_round"] > 0
    assert summary["peak_memory_mb"] > 0
    arrays, _ = last_checkpoint(run)
    rests = "encoder/" if method == "it-pfl" else SERVER  # not sent in the second of the two rounds
    shared = sum(v.nbytes / (1 + key.startswith(rests)) for key, v in arrays.items() if not key.startswith(SERVER))
    if (bias := arrays.get(f"{SERVER}head_bias")) is not None:
        shared += bias.nbytes  # one number per generated parameter
    if "embedding" in client_of(method).shared:
        shared += arrays[f"{SERVER}embeddings"][0].nbytes
    down_only = {name for name, reduction in client_of(method).shared.items() if reduction is Reduction.DOWN}
    unsent = sum(value.nbytes for key, value in arrays.items() if group_of(key) in down_only)
    assert summary["bytes_down_per_client_round"] == shared
    assert summary["bytes_up_per_client_round"] == shared - unsent
    assert summary["server_state_bytes"] == sum(value.nbytes for key, value in arrays.items() if key.startswith(SERVER))
    kept = [sum(value.nbytes for value in found.values()) for found in private_arrays(run).values()]
    assert summary["client_state_bytes"] == max(kept, default=0)
    assert (summary["client_state_bytes"] > 0) == bool(client_of(method).private)
    assert (shared > 0) == bool(client_of(method).shared)
    assert summary["bytes_on_wire_per_round"] >= 4 * shared - 2 * unsent  # two messages and two replies
    for record in read_metrics(run):
        numbers = [value for value in record.values() if isinstance(value, (int, float))]
        assert all(math.isfinite(number) for number in numbers), record
    manifest = read_manifest(run)
    assert manifest["status"] == "completed"
    train, test = load_federated_data(RunConfig.from_flat(manifest["settings"]).data_settings()).label_counts()
    assert manifest["label_counts"] == {"train": train.tolist(), "test": test.tolist()}
    if method in REPRESENTATIVES:
        assert (run / "plots" / "run.png").stat().st_size > 0
    assert "round 2/2" in (run / "server.log").read_text()


@of_every_method
def test_numbers_groups_and_uploads_are_as_declared(method: str, once: Federate) -> None:
    check_results(method, once)
    check_uploads(method, once)


@of_representatives
def test_private_state_is_readable_by_its_owner_alone(method: str, once: Federate) -> None:
    """Folders have mode 0700 and files 0600, one folder per client; they hold exactly the method's private groups.

    Next to the folders is the record of what the clients' uploads release.
    """
    run = once(method)
    assert mode_of(run / "clients") == 0o700
    folders = sorted(path for path in (run / "clients").iterdir() if path.is_dir())
    files = {path.name: mode_of(path) for path in (run / "clients").iterdir() if path not in folders}
    assert files == ({"privacy.jsonl": 0o600} if client_of(method).shared else {})
    private = client_of(method).private
    assert len(folders) == (NUM_CLIENTS if private else 0)
    assert all(mode_of(folder) == 0o700 for folder in folders)
    assert all(mode_of(path) == 0o600 for folder in folders for path in folder.iterdir())
    for arrays in private_arrays(run).values():
        assert {group_of(key) for key in arrays} == set(private)
    shared = client_of(method).active_groups(RunConfig.from_flat(settings_of(run)))
    reduced = {group for group, reduction in shared.items() if reduction is not Reduction.PER_CLIENT}
    held = {group_of(key) for key in last_checkpoint(run)[0]}
    assert held - {"server"} == reduced
    assert "server" in held or reduced == set(shared)


@of_every_method
def test_same_seed_is_bit_equal_whatever_the_nodes_are_called(method: str, once: Federate) -> None:
    check_repeatable(method, once)


@of_representatives
def test_the_server_holds_one_reply_at_a_time(method: str, federate: Federate) -> None:
    """Whenever a node is asked, no earlier reply is still held, so server memory does not grow with the nodes."""
    grids: list[ForgetfulGrid] = []

    def make(num_nodes: int, settings: Settings) -> ForgetfulGrid:
        grids.append(ForgetfulGrid(num_nodes, settings))
        return grids[-1]

    federate(method, num_nodes=NUM_CLIENTS, grid=make)
    assert grids[0].held == [0] * (2 * NUM_CLIENTS)


@of_representatives
def test_another_seed_gives_another_result(method: str, once: Federate) -> None:
    check_seed(method, once)


@of_representatives
def test_a_message_sent_twice_gives_the_same_reply_twice(method: str, federate: Federate) -> None:
    check_repeated_messages(method, federate)


@of_every_method
def test_unsampled_clients_keep_their_state(method: str, federate: Federate) -> None:
    check_sampling(method, federate)
