"""`hyperfl run --ray-address` on a cluster of two hosts: refusals, the same bits as on one machine, a host that dies.

The hosts are namespaces, which needs root. All tests use one cluster; the last one kills its second host.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import files, version
from pathlib import Path

import numpy as np
import pytest
from two_hosts import PORT, Host, obstacle, two_hosts
from waiting import eventually

from hyperfl_flwr.runs.run_directory import read_manifest, read_metrics

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(obstacle()), reason=f"no namespaces: {obstacle()}"),
    pytest.mark.extended,
]

HYPERFL = Path(sys.executable).with_name("hyperfl")
DIED_IN, ROUNDS, AFTER_RESUME = 3, 4, 5

NETWORK = """
import socket
import time
from pathlib import Path
from torch import nn

HERE, METRICS = Path({here!r}), Path({metrics!r})


class Traced(nn.Sequential):
    def forward(self, samples):
        if self.training:
            lines = METRICS.read_text() if METRICS.is_file() else ""
            number, host = lines.count('"kind": "train"') + 1, socket.gethostname()
            (HERE / f"trained-{{number}}-{{host}}").touch()
            while (number, host) == ({died_in}, "two"):
                time.sleep(1)
        return super().forward(samples)


def build(input_shape, num_classes):
    return Traced(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, num_classes))
"""
"""A network that leaves a file for each round and host that trains it, and does not come back from a round on `two`."""


def prepare(folder: Path) -> Path:
    """Create a folder with a network and data; a run that starts there goes below it."""
    folder.mkdir()
    source = NETWORK.format(here=str(folder), metrics=str(folder / "run" / "metrics.jsonl"), died_in=DIED_IN)
    (folder / "traced.py").write_text(source)
    write_data(folder / "data.npz", seed=0)
    return folder


def write_data(path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    np.savez(path, images=rng.integers(0, 256, (160, 4, 4), dtype=np.uint8), labels=np.arange(160) % 4)


def command(folder: Path, *words: str) -> list[str]:
    """Return the command of a small run of HyperFL on four nodes."""
    settings = {"local-epochs": 1, "threads": 1, "hyperfl.hidden-width": 8, "hyperfl.embedding-dim": 4}
    sets = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    sizes = ["--num-clients", "8", "--num-nodes", "4", "--dataset", f"npz:{folder / 'data.npz'}"]
    return ["env", "-C", str(folder), str(HYPERFL), "run", *sizes, "--model", "traced:build", *sets, *words]


def started(words: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str], code: int = 0) -> tuple[str, str]:
    out, err = process.communicate(timeout=600)
    assert process.returncode == code, (out, err)
    return out, err


def numbers(run: Path) -> list[dict[str, object]]:
    """Return a run's metrics without those that depend on the machine."""
    of_machine = ("seconds", "bytes", "memory")
    return [
        {key: value for key, value in record.items() if not any(word in key for word in of_machine)}
        for record in read_metrics(run)
    ]


def left_in(folder: Path) -> set[str]:
    """Return the names in a folder, without those of the network's own files."""
    return {path.name for path in folder.iterdir() if not path.name.startswith(("trained-", "__pycache__"))}


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Host, Host]]:
    with two_hosts(tmp_path_factory.mktemp("logs")) as hosts:
        yield hosts


def test_hosts_that_do_not_fit_are_refused_before_the_run(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    """One lacks the run's folder; then, with all folders, other data and another torch. The doctor sees it, too."""
    one, two = hosts
    address = f"{one.address}:{PORT}"
    folder, empty = prepare(tmp_path / "shared"), tmp_path / "empty"
    empty.mkdir()
    run = one.command(*command(folder, "--ray-address", address, "--output", str(folder / "run")))
    with two.instead(empty, folder):
        _, err = ended(started(run), code=2)
    assert f"two ({two.address}): it does not share the folder {folder}" in err
    (metadata,) = (Path(file.locate()) for file in files("torch") or () if file.match("torch-*.dist-info/METADATA"))
    altered = metadata.read_text().replace(f"\nVersion: {version('torch')}\n", "\nVersion: 2.0.9\n")
    (tmp_path / "METADATA").write_text(altered)
    write_data(tmp_path / "other.npz", seed=1)
    with two.instead(tmp_path / "METADATA", metadata), two.instead(tmp_path / "other.npz", folder / "data.npz"):
        refused = started(run)
        doctor = one.command("env", "-C", str(folder), str(HYPERFL), "doctor", "--json", "--ray-address", address)
        examined = started(doctor)
        _, err = ended(refused, code=2)
        found, _ = ended(examined, code=1)
    assert f"two ({two.address}): it has other versions: torch 2.0.9 (here" in err
    assert f"two ({two.address}): it has other data" in err
    assert left_in(folder) == {"data.npz", "traced.py"}
    texts = [finding["text"] for finding in json.loads(found) if finding["level"] == "error"]
    assert [text for text in texts if text.startswith(f"two ({two.address}): it has other versions: torch 2.0.9")]


def test_both_hosts_train_and_one_dies(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    """Both train in every round until one dies; the run goes on, and can be resumed on the other host alone.

    All metrics are those of one machine, bit for bit, and of the cluster nothing was ended.
    """
    one, two = hosts
    alone = prepare(tmp_path / "alone")
    single = ["--engine", "in-process", "--num-rounds", str(AFTER_RESUME), "--output", str(alone / "run")]
    reference = started(command(alone, *single))
    folder, address = prepare(tmp_path / "shared"), f"{one.address}:{PORT}"
    words = ["--ray-address", address, "--num-rounds", str(ROUNDS), "--output", str(folder / "run"), "--verbose"]
    run = started(one.command(*command(folder, *words)))
    eventually(lambda: run.poll() is not None or (folder / f"trained-{DIED_IN}-two").exists(), "training on two")
    two.die()
    ended(reference)
    out, err = ended(run)
    assert out.splitlines()[-1] == str(folder / "run")
    assert "A host of the Ray cluster died; 1 simulation process(es) remain." in err
    trained = {path.name.removeprefix("trained-") for path in folder.glob("trained-*")}
    both = {f"{number}-{host}" for number in range(1, DIED_IN + 1) for host in ("one", "two")}
    assert trained == both | {f"{number}-one" for number in range(DIED_IN + 1, ROUNDS + 1)}
    named = [{"name": host.name, "address": host.address, "cpus": 1, "gpus": 0} for host in hosts]
    assert read_manifest(folder / "run")["hosts"] == named
    resume = ["--resume", str(folder / "run"), "--num-rounds", str(AFTER_RESUME), "--ray-address", address]
    ended(started(one.command("env", "-C", str(folder), str(HYPERFL), "run", *resume)))
    assert read_manifest(folder / "run")["resumed"][0]["hosts"] == named[:1]
    assert numbers(folder / "run") == numbers(alone / "run")
    assert left_in(folder) == {"data.npz", "run", "traced.py"}
    status = (Path(sys.executable).with_name("ray"), "status", f"--address={address}")
    # The cluster reports it some seconds later.
    eventually(lambda: "0.0/1.0 CPU" in one.run(*status).stdout, "the loss of a host")
