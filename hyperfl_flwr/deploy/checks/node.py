"""`hyperfl deploy check` on a node's machine: check its folder, device, data and connection before a run."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import httpx
import torch

from hyperfl_flwr.config.grouping import owners_grouping
from hyperfl_flwr.config.node_config import NodeConfig
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.config.table import default_settings
from hyperfl_flwr.core.device import resolve_device
from hyperfl_flwr.core.errors import ConfigError, DataError, DeviceError, RefusalError, StateError
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.data.registry import load_dataset
from hyperfl_flwr.data.sample_format import SampleFormat
from hyperfl_flwr.deploy.checks import files as machine
from hyperfl_flwr.deploy.checks.peers import pinned_keys
from hyperfl_flwr.deploy.checks.probe import clock, probe
from hyperfl_flwr.deploy.keys import read_node_key
from hyperfl_flwr.deploy.node_settings import FILE, PLACE, NodeAddress, read_node_config
from hyperfl_flwr.deploy.provision import VERSIONS
from hyperfl_flwr.flower.superlink.fleet_api import Registration, ask_registration
from hyperfl_flwr.launch import other_accounts
from hyperfl_flwr.launch.findings import Finding, Level, error, ok, warning
from hyperfl_flwr.launch.machine_checks import gpus
from hyperfl_flwr.privacy.budget import FILE as PRIVACY_RECORD
from hyperfl_flwr.privacy.budget import read_record
from hyperfl_flwr.privacy.secret_rotation import read_key
from hyperfl_flwr.privacy.spent import spent, spent_together

FILES = ("ca.crt", "node.key", FILE, PLACE, VERSIONS, "start.sh")


def check_node(folder: Path, announced: Mapping[str, Scalar]) -> Iterator[Finding]:
    """Check a node's folder and machine. No data leave the machine; decoded images are cached in the state-dir.

    Args:
        folder: Folder of the node.
        announced: The run's settings of the data, as the operator has announced them.

    Raises:
        ConfigError: If one of these settings is wrong.
    """
    sample_format = RunConfig.from_flat({**default_settings(), **announced}).data_settings().sample_format
    yield from machine.files(folder, FILES)
    yield from machine.private("modes", [folder, folder / "node.key"])
    yield from machine.authority(folder)
    yield from machine.same_versions(folder)
    try:
        place, node = NodeAddress.read(folder), read_node_config(folder)
    except ConfigError as failure:
        yield error("settings", str(failure), "correct them and check again; the other checks were skipped")
        return
    yield ok("settings", f"node {place.number}; the deployment had {place.nodes} nodes when it was added")
    yield from machine.private("state", [Path(node.state_dir)])
    yield from machine.writable("state", Path(node.state_dir))
    yield from other_accounts.deployments()
    yield from _device(node.device)
    yield from _mixing_key(node.mixing_key_file)
    yield from pinned_keys(folder, place, node)
    yield from _privacy_budget(node)
    try:
        grouping = node.group_by or owners_grouping(announced, simulated=False) or sample_format.grouping
    except RefusalError as failure:
        yield error("data", str(failure), f"ask the operator to change it, or set group-by in {FILE}")
        grouping = sample_format.grouping
    yield from _data(node, replace(sample_format, grouping=grouping))
    yield from _server(folder, place)


def _device(name: str) -> Iterator[Finding]:
    try:
        device = resolve_device(name)
    except DeviceError as failure:
        yield error("device", str(failure), f"set device in {FILE}, or install torch for this machine's GPU")
        return
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        model = torch.cuda.get_device_name(device)
        yield ok("device", f"{device} ({model}), {free / 2**30:.1f} of {total / 2**30:.1f} GiB are free")
    else:
        yield ok("device", f"the CPU, because device is {name!r}")
        if name == "auto":  # warn of a GPU that torch cannot use
            yield from (found for found in gpus() if found.level is not Level.OK)


def _mixing_key(file: str) -> Iterator[Finding]:
    if not file:
        return
    try:
        read_key(Path(file))
    except ConfigError as failure:
        yield error("mixing-key-file", str(failure), f"set it in {FILE}")
        return
    yield from machine.private("mixing-key-file", [Path(file)])


def _privacy_budget(node: NodeConfig) -> Iterator[Finding]:
    """Check the record of what was spent, and compare it with the owner's budget."""
    file, limit, delta = Path(node.state_dir) / PRIVACY_RECORD, node.max_epsilon, node.max_epsilon_delta
    try:
        record = read_record(file) if file.exists() else []
    except StateError as failure:
        yield error("privacy", str(failure), "without it, uploads are refused as soon as max-epsilon is set")
        return
    if limit is None:
        if record:
            yield ok("privacy", f"{len(record)} uploads recorded; max-epsilon is not set in {FILE}, so none is refused")
        return
    if node.has_one_client:
        largest = spent_together(record, delta).counted_epsilon if record else 0.0
    else:
        largest = max((row.counted_epsilon for row in spent(record, delta)), default=0.0)
    text = f"max-epsilon = {limit:g} at delta {delta:g}; {len(record)} uploads have spent {largest:.4g}"
    if largest >= limit:
        yield warning("privacy", text, f"further uploads are refused; a larger max-epsilon in {FILE} allows some")
    else:
        yield ok("privacy", text)


def _data(node: NodeConfig, sample_format: SampleFormat) -> Iterator[Finding]:
    """Check that the data can be read, and describe them."""
    if node.novel_data:
        yield from _novel_data("novel-data", Path(node.novel_data), node.novel_output)
        return
    if node.join_data:
        yield from _novel_data("join-data", Path(node.join_data.partition(":")[2]), node.novel_output)
        return
    if not node.data:
        yield warning("data", f"not set in {FILE}; the node uses the data set of the run", f"set data in {FILE}")
        return
    root = Path(node.data_root) if node.data_root else None
    try:
        own = replace(sample_format, has_owner=True, cache=Path(node.state_dir))
        dataset = load_dataset(node.data, root, own if node.has_local_data else sample_format)
    except (DataError, ConfigError) as failure:
        yield error("data", str(failure), f"set data in {FILE}")
        return
    shape = " x ".join(str(size) for size in dataset.input_shape)
    counts = f"{len(dataset.train)} samples for training, {len(dataset.test)} for testing"
    yield ok("data", f"{node.data}: {shape}, {dataset.num_classes} classes, {counts}")
    limits = {"min-samples": (node.min_samples, len(dataset.train)),
              "min-test-samples": (node.min_test_samples, len(dataset.test))}  # fmt: skip
    for key, (least, count) in limits.items():
        # A node with a privacy budget sends no accuracies, and needs no test samples.
        if count < least and not (key == "min-test-samples" and node.max_epsilon is not None):
            text = f"{count} samples are fewer than {key} = {least}, so that no round is answered"
            yield error("data", text, f"lower {key} in {FILE}")
    for note in dataset.notes:
        yield warning("data", note, f"set group-by in {FILE}")


def _novel_data(key: str, data: Path, output: str) -> Iterator[Finding]:
    if not data.exists():
        yield error(key, f"{data} is missing", f"set {key} in {FILE}")
    elif not output:
        yield error("novel-output", f"not set, but {key} needs a folder for results", f"set novel-output in {FILE}")
    else:
        yield ok(key, f"{data} exists; whether the data fit depends on the run's settings")
        yield from machine.writable("novel-output", Path(output))


def _server(folder: Path, place: NodeAddress) -> Iterator[Finding]:
    answer, found = probe(place.host, place.port, folder / "ca.crt")
    yield found
    if answer is None:
        return
    yield clock(answer)
    try:
        key = read_node_key(folder / "node.key")
        registration = ask_registration(f"{place.host}:{place.port}", folder / "ca.crt", key)
    except StateError as failure:
        yield error("key", str(failure), "ask the operator for this node's folder again")
        return
    except (httpx.TransportError, OSError) as failure:
        yield error("key", f"the SuperLink could not be asked ({failure})", "check again")
        return
    yield _registered(registration)


def _registered(registration: Registration) -> Finding:
    if registration is Registration.KNOWN:
        return ok("key", "it is registered with the SuperLink")
    if registration is Registration.UNKNOWN:
        remedy = "ask the operator to run `hyperfl deploy register`"
        return error("key", "it is not registered with the SuperLink", remedy)
    if registration is Registration.REFUSED:
        return error("key", "its signature is refused", "set the clocks; a proxy must not change the headers")
    remedy = "compare the versions on both sides, and ask the operator whether --enable-supernode-auth is set"
    return error("key", "the SuperLink's answer is not understood", remedy)
