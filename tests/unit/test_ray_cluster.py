"""The hosts of a Ray cluster: what `ray.nodes()` says, where processes go, what is refused, and clear errors."""

import json
import platform
import shutil
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from federations import Call
from ray._private.utils import check_version_info

import hyperfl_flwr as hyperfl
from hyperfl_flwr.app import host_report
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.config.table import default_settings
from hyperfl_flwr.core.errors import ConfigError, DeviceError
from hyperfl_flwr.core.packages import code_version
from hyperfl_flwr.data.digests import data_digest
from hyperfl_flwr.data.federated_data import load_federated_data
from hyperfl_flwr.flower.ray_start import WITHOUT_HELPERS
from hyperfl_flwr.launch.app_bundle import build_app
from hyperfl_flwr.launch.findings import Level
from hyperfl_flwr.launch.flower.env import JOB_CONFIG, actor_environment, flower_environment
from hyperfl_flwr.launch.planning import plan
from hyperfl_flwr.launch.plans import SimulationPlan
from hyperfl_flwr.launch.ray_cluster.checks import of_cluster, of_hosts
from hyperfl_flwr.launch.ray_cluster.client import _explained, differences
from hyperfl_flwr.launch.ray_cluster.hosts import Cluster, Host, hosts_of, parse_address
from hyperfl_flwr.launch.ray_cluster.run import refuse_busy


def row(number: int, *, alive: bool = True, **resources: float) -> dict[str, Any]:
    """Return a row of `ray.nodes()`, with its keys of Ray 2.55; a dead host has no resources."""
    return {
        "NodeID": f"{number:02x}" * 28,
        "Alive": alive,
        "NodeManagerAddress": f"10.0.0.{number}",
        "NodeManagerHostname": f"host-{number}",
        "Resources": {"memory": 64e9, **resources} if alive else {},
    }


def cluster(*hosts: tuple[int, int], free: int | None = None, has_token: bool = True) -> Cluster:
    """Return a cluster of hosts with the given numbers of CPUs and GPUs."""
    found = hosts_of(row(number, CPU=cpus, GPU=gpus) for number, (cpus, gpus) in enumerate(hosts, start=1))
    free = sum(cpus for cpus, _ in hosts) if free is None else free
    return Cluster(address="10.0.0.1:6379", hosts=found, driver="10.0.0.1", free_cpus=free, has_token=has_token)


def test_hosts_are_read_from_rays_answer() -> None:
    """In the order of addresses, without dead hosts and those that only coordinate."""
    rows = [row(3, CPU=4.0, GPU=2.0), row(2, alive=False), row(1, CPU=2.0), row(4)]
    assert hosts_of(rows) == [
        Host(id="01" * 28, name="host-1", address="10.0.0.1", cpus=2, gpus=0, memory=64e9),
        Host(id="03" * 28, name="host-3", address="10.0.0.3", cpus=4, gpus=2, memory=64e9),
    ]


def flower_starts(found: Cluster, config: str) -> int:
    """Return the number of processes that Flower's `pool_size_from_resources` counts, with the share as float32."""
    given = dict(word.split("=") for word in config.split())
    cpus = int(given["client-resources-num-cpus"])
    share = float(np.float32(given.get("client-resources-num-gpus", "0")))
    by_cpu = [int(host.cpus / cpus) for host in found.hosts]
    by_gpu = [int(host.gpus / share) for host in found.hosts] if share else by_cpu
    return sum(map(min, by_cpu, by_gpu))


@pytest.mark.parametrize(
    ("hosts", "nodes", "threads", "expected"),
    [
        ([(1, 0), (1, 0)], 4, 1, (2, 1, 0)),
        ([(64, 0), (64, 0)], 16, 1, (16, 8, 0)),
        ([(8, 0), (4, 0)], 3, 1, (3, 4, 0)),
        ([(8, 0), (4, 0)], 8, 3, (3, 4, 0)),
        ([(8, 2), (8, 2)], 12, 1, (12, 1, 3)),
        ([(8, 1), (8, 0)], 3, 1, (3, 2, 3)),
        ([(2, 1)], 7, 1, (2, 1, 64)),
    ],
)
def test_every_node_gets_a_process_if_there_is_room(
    hosts: list[tuple[int, int]], nodes: int, threads: int, expected: tuple[int, int, int]
) -> None:
    """Processes, CPUs of each and processes per GPU; Flower starts as many processes as were counted here."""
    found = cluster(*hosts)
    on_gpus = any(gpus for _, gpus in hosts)
    placement = found.placement(nodes, threads, on_gpus=on_gpus)
    assert (placement.processes, placement.cpus, placement.on_gpu) == expected
    config = placement.federation_config(nodes)
    assert flower_starts(found, config) == placement.processes
    assert f"num-supernodes={nodes} " in config
    assert "init-args-num" not in config  # which Ray refuses
    assert {host.name for host in placement.hosts} == {
        f"host-{number}" for number, (_, gpus) in enumerate(hosts, start=1) if gpus or not on_gpus
    }


def test_without_room_for_one_process_nothing_starts() -> None:
    with pytest.raises(
        DeviceError, match=r"10\.0\.0\.1:6379 has no host with 4 CPU\(s\) for a training process \(2 host"
    ):
        cluster((2, 0), (3, 0)).placement(2, 4, on_gpus=False)
    with pytest.raises(DeviceError, match=r"no host with 1 CPU\(s\) and a GPU"):
        cluster((2, 0)).placement(2, 1, on_gpus=True)


@pytest.mark.parametrize(("text", "expected"), [("head:6379", ("head", 6379)), ("[fd00::1]:80", ("fd00::1", 80))])
def test_an_address_is_host_and_port(text: str, expected: tuple[str, int]) -> None:
    assert parse_address(text) == expected


@pytest.mark.parametrize("text", ["", "auto", "head", "head:", ":6379", "ray://head:10001", "head:70000", "head:6379/"])
def test_wrong_addresses_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"must be HOST:PORT, as `ray start --head` prints it, got"):
        parse_address(text)


def planned(found: Cluster, tmp_path: Path, **changes: Any) -> SimulationPlan:
    given = {name.replace("_", "-"): value for name, value in changes.items()}
    return plan({"num-clients": 8, "output": str(tmp_path / "run"), **given}, None, "ray", found)


def test_nodes_threads_and_gpus_are_those_of_the_cluster(tmp_path: Path) -> None:
    """Whatever this machine has. A process's threads are CPUs of one host, although 10 CPUs could give each node 2."""
    found = planned(cluster((4, 0), (4, 0)), tmp_path)
    assert (found.num_nodes, found.threads, found.device, found.num_gpus) == (8, 1, "cpu", 0)
    assert found.chosen_for == "2 host(s) with 8 CPUs"
    assert planned(cluster((5, 0), (3, 0), (2, 0)), tmp_path, num_clients=4).threads == 2
    assert planned(cluster((3, 0), (3, 0), (3, 0)), tmp_path, num_clients=4).threads == 1
    on_gpus = planned(cluster((4, 1), (4, 1)), tmp_path)
    assert (on_gpus.device, on_gpus.num_gpus) == ("cuda", 2)
    assert planned(cluster((4, 1), (4, 1)), tmp_path, device="cpu").num_gpus == 0
    with pytest.raises(DeviceError, match=r"device is cuda, but the Ray cluster at 10\.0\.0\.1:6379 has no GPU"):
        planned(cluster((4, 0)), tmp_path, device="cuda")
    with pytest.raises(DeviceError, match=r"no host with 4 CPU"):
        planned(cluster((3, 0), (3, 0)), tmp_path, threads=4)


OWN = {"versions/numpy": "2.4.0", "versions/torch": "2.15.0", "code": "c", "network": "", "data": "d", "device": "cpu"}

MISFITS = {
    "equal": ({}, []),
    "a problem": ({"problem": "DataError: no file"}, ["DataError: no file"]),
    "versions": (
        {"versions/torch": "2.14.0", "versions/numpy": "1.26.4"},
        ["it has other versions: numpy 1.26.4 (here 2.4.0), torch 2.14.0 (here 2.15.0)"],
    ),
    "a package more": ({"versions/ray": "2.55.1"}, ["it has other versions: ray 2.55.1 (here missing)"]),
    "code": ({"code": "other"}, ["it has other code of hyperfl-flwr"]),
    "a network": ({"network": "n"}, ["it has another source of the network (target)"]),
    "data": ({"data": "other"}, ["it has other data in the data set's files"]),
    "no GPU": ({"device": "cuda"}, ["it trains on cuda, this run on cpu"]),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_host_that_differs_is_named_with_the_reason(name: str) -> None:
    changes, reasons = MISFITS[name]
    first, second = cluster((1, 0), (1, 0)).hosts
    reports = {"": OWN, first.id: OWN, second.id: OWN | changes}
    assert differences([first, second], reports, "cpu") == [f"host-2 (10.0.0.2): {reason}" for reason in reasons]


def test_this_machine_and_new_hosts_are_checked_too() -> None:
    (host,) = cluster((1, 0)).hosts
    assert differences([host], {"": {"problem": "no"}, host.id: OWN}) == ["this machine: no"]
    assert differences([host], {"": OWN}) == [
        "host-1 (10.0.0.1): it has joined the cluster just now; repeat the command"
    ]


def test_another_file_is_other_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The digest is that of the folder from which the code is imported, wherever it lies."""
    app = build_app(tmp_path / "app")
    shutil.copytree(app, tmp_path / "copy")
    shutil.copytree(app, tmp_path / "altered")
    with (tmp_path / "altered" / "clients" / "fedavg.py").open("a") as file:
        file.write("\n")

    def digest(folder: str) -> str:
        monkeypatch.setattr(code_version, "ROOT", tmp_path / folder)
        return host_report.code_digest()

    assert digest("app") == digest("copy") != digest("altered")


def test_other_samples_are_other_data(tmp_path: Path) -> None:
    """One pixel, one label or one client id makes a difference, the file's name and date do not."""
    rng = np.random.default_rng(0)
    arrays = {
        "images": rng.integers(0, 256, (40, 8, 8), dtype=np.uint8),
        "labels": np.arange(40) % 4,
        "clients": np.arange(40) % 2,
    }

    def digest(name: str, change: Callable[[Mapping[str, Any]], None] = lambda _: None) -> str:
        changed = {key: array.copy() for key, array in arrays.items()}
        change(changed)
        np.savez(tmp_path / f"{name}.npz", **changed)
        given = default_settings() | {"dataset": f"npz:{tmp_path / name}.npz", "num-clients": 2}
        return data_digest(load_federated_data(RunConfig.from_flat(given).data_settings()).dataset)

    def set_to(key: str, position: Any, value: int) -> Callable[[Mapping[str, Any]], None]:
        return lambda changed: changed[key].__setitem__(position, value)

    pixel = int(arrays["images"][0, 0, 0]) ^ 1
    others = [
        digest("pixel", set_to("images", (0, 0, 0), pixel)),
        digest("label", set_to("labels", 0, 1)),
        digest("client", set_to("clients", 0, 1)),
    ]
    assert digest("one") == digest("two")
    assert len({digest("one"), *others}) == 4


def test_findings_of_the_doctor(tmp_path: Path) -> None:
    """A whole cluster has none; each lack has its remedy."""
    whole = cluster((2, 1), (2, 1))
    reports = {"": {"data-sets": "digits,mnist"}} | {host.id: {"data-sets": "digits,mnist"} for host in whole.hosts}
    assert {finding.level for finding in [*of_cluster(whole), *of_hosts(whole, reports, tmp_path)]} == {Level.OK}
    poor = cluster((2, 1), (2, 0), free=3, has_token=False)
    first, second = poor.hosts
    found = [*of_cluster(poor)]
    assert [finding.subject for finding in found if finding.level is Level.WARNING] == [
        "Ray cluster", "GPUs of hosts", "token",
    ]  # fmt: skip
    assert "reserved 1 of the 4 CPUs" in found[1].text
    assert "host-2 (10.0.0.2) have no GPU" in found[2].text
    reports |= {first.id: {"problem": "it does not share the folder"}, second.id: {"data-sets": "digits"}}
    refused, lacking = of_hosts(poor, reports, tmp_path)
    assert (refused.level, refused.text) == (Level.ERROR, "host-1 (10.0.0.1): it does not share the folder")
    assert (lacking.level, lacking.text) == (Level.WARNING, "host-2 (10.0.0.2) lacks mnist, which this machine has")


def test_a_cluster_that_other_jobs_use_is_refused() -> None:
    refuse_busy(cluster((2, 0)))
    with pytest.raises(DeviceError, match=r"other jobs have reserved 1 of the 2 CPUs .*; wait for their end"):
        refuse_busy(cluster((2, 0), free=1))


def test_the_environment_on_a_cluster(tmp_path: Path) -> None:
    """The cluster's address and the user's token hold, and what a job of Ray has set is kept."""
    job = {"metadata": {"job": "7"}, "runtime_env": {"env_vars": {"A": "1", "PYTHONPATH": "/x"}}}
    base = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "/t", "RAY_TMPDIR": "/r", JOB_CONFIG: json.dumps(job)}
    found = flower_environment(tmp_path, tmp_path, base, ray_address="h:1")
    assert found["RAY_ADDRESS"] == "h:1"
    assert {name: found[name] for name in base if name != JOB_CONFIG} == {k: base[k] for k in base if k != JOB_CONFIG}
    expected = {"env_vars": {**actor_environment(), "A": "1"}}
    assert json.loads(found[JOB_CONFIG]) == {"metadata": {"job": "7"}, "runtime_env": expected}
    assert found["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "1"
    assert WITHOUT_HELPERS not in found
    alone = flower_environment(tmp_path, tmp_path, base | {"RAY_ADDRESS": "other:1"})
    assert not {"RAY_ADDRESS", "RAY_AUTH_TOKEN_PATH", JOB_CONFIG} & alone.keys()
    assert alone["RAY_AUTH_TOKEN"]
    assert alone[WITHOUT_HELPERS] == "1"


def test_errors_of_ray_are_explained() -> None:
    """The text about versions is Ray's own."""
    with pytest.raises(RuntimeError) as caught:
        check_version_info({"ray_version": "2.9.0", "python_version": "3.9.1"}, "10.0.0.1")
    text = _explained("h:1", caught.value)
    assert text.startswith("the Ray cluster at h:1 runs Ray 2.9.0 and Python 3.9.1, but this is Ray ")
    assert f"Python {platform.python_version()}; install the same versions" in text
    assert "set RAY_AUTH_MODE=token" in _explained("h:1", RuntimeError("Unauthenticated: invalid token"))
    assert "start the command on one of its hosts" in _explained("h:1", ConnectionError("no raylet here"))


def test_a_cluster_that_does_not_answer_is_named(call: Call, tmp_path: Path) -> None:
    """The run, its estimate, the doctor and the function say so, and nothing is written."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    message = f"no Ray cluster answers at {address}"
    for words in (["run", "--output", tmp_path / "run"], ["run", "--dry-run"]):
        code, _, err = call(*words, "--ray-address", address)
        assert (code, message in err) == (2, True), err
    with pytest.raises(DeviceError, match=message):
        hyperfl.run(ray_address=address, output=tmp_path / "run")
    code, out, _ = call("doctor", "--json", "--ray-address", address)
    (finding,) = (each for each in json.loads(out) if each["subject"] == "Ray cluster")
    assert (code, finding["level"], message in finding["text"]) == (1, "error", True)
    assert not (tmp_path / "run").exists()


WRONG = {
    "no port": (["--ray-address", "head"], "must be HOST:PORT"),
    "a deployment": (["--ray-address", "h:1", "--deployment", "."], "--ray-address and --dry-run are for simulations"),
}


@pytest.mark.parametrize("name", WRONG)
def test_options_that_do_not_fit_a_cluster_are_refused(name: str, call: Call) -> None:
    words, message = WRONG[name]
    code, _, err = call("run", *words)
    assert (code, message in err) == (2, True), err


def test_one_process_is_not_for_a_cluster(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="leave it out to train on a Ray cluster"):
        plan({"output": str(tmp_path / "run")}, None, "in-process", cluster((1, 0)))
