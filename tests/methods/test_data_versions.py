"""Versions of the user's data: recorded, and noticed when they change."""

import json
from dataclasses import replace

import numpy as np
import pytest

from hyperfl_flwr.api.run import Run
from hyperfl_flwr.app.client import app
from hyperfl_flwr.contract.folders import outcome
from hyperfl_flwr.contract.grids import round_of
from hyperfl_flwr.core.errors import DataError, RunDirectoryError
from hyperfl_flwr.deploy.owner_page import write_owner_page
from hyperfl_flwr.node.data_versions import FILE, Version, changed_versions, note, versions_of
from hyperfl_flwr.results.compare import compare
from hyperfl_flwr.server.in_process_grid import InProcessGrid


def write(file, seed=0, count=100):
    rng = np.random.default_rng(seed)
    np.savez(file, images=rng.integers(0, 256, (count, 8, 8)).astype(np.uint8), labels=np.arange(count) % 4)
    return f"npz:{file}"


def own(file):
    return {"dataset": f"npz:{file}", "num-clients": 2, "data.partition": "iid"}


def sha_of(run):
    return json.loads((run / "manifest.json").read_text())["data"]["sha256"]


def test_a_simulation_records_the_hash_of_custom_data_only(federate, tmp_path):
    file = tmp_path / "own.npz"
    write(file)
    run = federate("fedavg", **own(file))
    assert len(sha_of(run)) == 64
    assert sha_of(federate("fedavg", **own(file))) == sha_of(run)
    write(file, seed=1)
    assert sha_of(federate("fedavg", **own(file))) != sha_of(run)
    assert sha_of(federate("fedavg")) == ""


def test_a_run_is_not_resumed_on_other_data(federate, tmp_path):
    file = tmp_path / "own.npz"
    write(file)
    run = federate("fedavg", **own(file))
    write(file, seed=1)
    with pytest.raises(
        RunDirectoryError, match=r"own\.npz has changed since the run began: its SHA-256 was [0-9a-f]{8}"
    ):
        federate("fedavg", resume=str(run), num_rounds=3, **own(file))
    write(file)
    assert federate("fedavg", resume=str(run), num_rounds=3, **own(file)) == run


def test_data_that_have_moved_are_found_below_the_data_root(federate, tmp_path):
    """A resumed run and its models read the file at its new place, but no other file of the same name."""
    file, moved = tmp_path / "own.npz", tmp_path / "now" / "own.npz"
    write(file)
    run = federate("fedavg", **own(file))
    expected = Run(run).export(0)
    moved.parent.mkdir()
    file.rename(moved)
    places = {"resume": str(run), "num_rounds": 3, **own(file)}
    with pytest.raises(DataError, match=rf"^{file}: must be an existing \.npz file; .* with --data-root$"):
        Run(run).export(0)
    with pytest.raises(DataError, match=rf"^{file}: must be an existing \.npz file, or {tmp_path / 'x' / 'own.npz'};"):
        Run(run).export(0, data_root=tmp_path / "x")
    found = Run(run).export(0, data_root=moved.parent)
    assert (found.recipe, found.score) == (expected.recipe, expected.score)
    write(moved, seed=1)
    with pytest.raises(RunDirectoryError, match="has changed since the run began: its SHA-256 was"):
        Run(run).export(0, data_root=moved.parent)
    with pytest.raises(RunDirectoryError, match="has changed since the run began: its SHA-256 was"):
        federate("fedavg", **places, data_root=str(moved.parent))
    write(moved)
    assert federate("fedavg", **places, data_root=str(moved.parent)) == run


def test_a_file_that_is_replaced_during_a_run_does_not_change_it(federate, tmp_path):
    """The bits are those of a run with the old file; the next run reads the new one."""
    file, new = tmp_path / "own.npz", tmp_path / "new.npz"

    class Replacing(InProcessGrid):
        def answer(self, message):
            if round_of(message) == 2 and new.exists():
                new.replace(file)
            return super().answer(message)

    def replacing(num_nodes, settings):
        return Replacing(app, num_nodes, settings, {"simulated": True})

    write(file)
    expected = outcome(federate("fedavg", num_rounds=3, **own(file)))
    write(new, seed=1)
    assert outcome(federate("fedavg", num_rounds=3, grid=replacing, **own(file))) == expected
    assert not new.exists()
    assert outcome(federate("fedavg", num_rounds=3, **own(file))) != expected


def test_runs_on_two_versions_are_no_seeds_of_one_group(federate, tmp_path):
    file = tmp_path / "own.npz"
    write(file)
    runs = [federate("fedavg", **own(file)), federate("fedavg", seed=1, **own(file))]
    assert len(compare(runs).groups) == 1
    write(file, seed=1)
    found = compare([*runs, federate("fedavg", seed=2, **own(file))])
    assert [len(group.runs) for group in found.groups] == [2, 1]
    assert all("data version" in group.label for group in found.groups)


def test_an_owners_node_warns_and_lists_the_versions(federate, tmp_path, caplog):
    """Its hash stays on the node; the page of its owner has both versions."""
    file, state = tmp_path / "own.npz", tmp_path / "state"

    def node(number, flat):
        return InProcessGrid(app, number, flat, {"data": write(file, seed), "state-dir": str(state), "device": "cpu"})

    settings = {"num-clients": 1, "data.classes": "0,1,2,3"}
    for seed in (0, 0, 1):
        caplog.clear()
        run = federate("fedavg", 1, grid=node, **settings)
        assert sha_of(run) == ""
        assert ("the data own.npz have changed since the run of" in caplog.text) is (seed == 1)
    versions = versions_of(state)
    assert [(each.title, each.train, each.test) for each in versions] == [("own.npz", 76, 24)] * 2
    assert versions[0].sha256 != versions[1].sha256
    page = write_owner_page(state).read_text()
    assert all(each.sha256[:8] in page for each in versions)
    assert (state / FILE).stat().st_mode & 0o077 == 0
    sent = (state / "ledger.jsonl").read_text()
    assert not any(each.sha256 in sent for each in versions)


def test_what_is_no_change(tmp_path):
    first = Version(title="a.npz", sha256="1" * 64, train=3, test=1)
    assert note(tmp_path, first) is None
    assert note(tmp_path, first) is None
    assert note(tmp_path, Version(title="b.npz", sha256="2" * 64, train=3, test=1)) is None
    assert [each.title for each in versions_of(tmp_path)] == ["a.npz", "b.npz"]
    other = Version(title="a.npz", sha256="3" * 64, train=3, test=1, form="f")
    assert note(tmp_path, other) is None  # read with other settings
    assert changed_versions(tmp_path) == []
    assert note(tmp_path, replace(first, sha256="4" * 64)) is not None
    assert [each.sha256[0] for each in changed_versions(tmp_path)] == ["1", "4"]
    with (tmp_path / FILE).open("ab") as file:
        file.write(b'{"title": \xff')
    assert len(versions_of(tmp_path)) == 4
