"""Build a run's manifest: its settings, versions, code, hardware, nodes and data."""

import json
import os
import platform
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from hyperfl_flwr.core.packages.code_version import code_entry
from hyperfl_flwr.core.packages.versions import versions
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.core.tasks import task_of
from hyperfl_flwr.runs.listed_clients import labels_entry, nodes_entry
from hyperfl_flwr.runs.run_data import RunData
from hyperfl_flwr.server.federation import Federation
from hyperfl_flwr.server.roster import Roster


def new(
    settings: Mapping[str, Scalar],
    resolved: Mapping[str, Any],
    roster: Roster,
    sources: Mapping[str, Any],
    *,
    hosts: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Return the manifest of a new run.

    Args:
        settings: The requested settings.
        resolved: The value that replaces each `auto`, see `hyperfl_flwr.app.resolved`.
        roster: The nodes of the run.
        sources: The entries about a network and a method of the user's own, see `hyperfl_flwr.models.provenance`;
            empty for built-in ones.
        hosts: The hosts of the Ray cluster on which a simulation trains; none for a single machine.
    """
    federation = roster.federation
    document = {
        "experiment": secrets.token_hex(8),
        "status": "running",
        "problem": "",
        "settings": dict(settings),
        "resolved": dict(resolved),
        **_circumstances(hosts),
        "end": None,
        "resumed": [],
        "nodes": nodes_entry([roster.clients_of(number) for number in range(roster.num_nodes)]),
        "devices": [None] * roster.num_nodes,
        "present_at_start": [node.partition for node in federation.nodes],
        "partitioned_by": federation.nodes[0].properties["partitioned-by"],
        "data": RunData.of(federation, str(settings["dataset"]), task_of(settings)).entry(),
        **(_label_counts(federation, int(settings["num-clients"])) if roster.simulated else {}),
        **sources,
    }
    return with_nodes(document, roster)


def with_nodes(old: Mapping[str, Any], roster: Roster) -> dict[str, Any]:
    """Return a manifest updated with nodes that joined later and with refused and excluded nodes.

    Nodes that joined, or were excluded, before the run was resumed stay in it; of a node's exclusions the last counts.
    """
    nodes = {node.partition: node for node in roster.federation.nodes}
    devices = [
        nodes[number].properties["device"] if number in nodes else before
        for number, before in enumerate(old["devices"])
    ]
    refused = [{"node": refusal.number, "reason": refusal.reason} for refusal in roster.refused]
    joined = sorted((roster.seen - set(old["present_at_start"])) | set(old.get("joined", ())))
    excluded = [asdict(exclusion) for exclusion in roster.exclusions]
    again = {entry["node"] for entry in excluded}
    excluded = [entry for entry in old.get("excluded", ()) if entry["node"] not in again] + excluded
    data = RunData.read(old)
    if nodes:  # there may be none: all may be away or excluded
        settings = old["settings"]
        now = RunData.of(roster.federation, str(settings["dataset"]), task_of(settings))
        data = now.with_earlier(data)
    found = {"devices": devices, "joined": joined, "refused": refused, "excluded": excluded, "data": data.entry()}
    return {**old, **found}


def resumed(
    old: Mapping[str, Any],
    settings: Mapping[str, Scalar],
    resolved: Mapping[str, Any],
    roster: Roster,
    *,
    begun_rounds: int,
    repeated_rounds: int,
    hosts: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Return the manifest of a resumed run: the old one with the new settings, versions, code and hardware.

    Args:
        old: The manifest before.
        settings: The requested settings.
        resolved: The value that replaces each `auto`.
        roster: The nodes of the run.
        begun_rounds: Number of rounds that had begun; exclusions end with the last, as all nodes are asked again.
        repeated_rounds: Number of these rounds that are repeated.
        hosts: The hosts of the Ray cluster on which the simulation continues; none for a single machine.
    """
    history = [*old.get("resumed", []), {**_circumstances(hosts), "repeated_rounds": repeated_rounds}]
    began = {"status": "running", "problem": "", "end": None, "resumed": history}
    given = {"settings": dict(settings), "resolved": dict(resolved)}
    excluded = [
        {**entry, "until": begun_rounds if entry["until"] is None else min(entry["until"], begun_rounds)}
        for entry in old.get("excluded", ())
    ]
    # Manifests of earlier versions lack `present_at_start`.
    return with_nodes({"present_at_start": [], **old, **given, **began, "excluded": excluded}, roster)


def _circumstances(hosts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    found = {"start": now(), "versions": versions(), "code": code_entry(), "hardware": hardware()}
    return found | ({"hosts": list(hosts)} if hosts else {})


def _label_counts(federation: Federation, num_clients: int) -> dict[str, Any]:
    """Return label counts and data reuse as reported by a simulation's nodes; a deployment's nodes are not asked."""
    counts = federation.label_counts()
    if not counts:
        return {}
    ordered = {split: [rows[client] for client in sorted(rows)] for split, rows in counts.items()}
    reuse = json.loads(str(federation.nodes[0].properties["data-reuse"]))
    return {"label_counts": labels_entry(ordered, num_clients), "data_reuse": reuse}


def hardware() -> dict[str, Any]:
    """Return the processor, number of cores, memory (10^9 bytes) and GPUs of this machine."""
    return {
        "machine": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "gpus": [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())],
    }


def now() -> str:
    """Return the current time in ISO 8601 with the time zone."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    if information.is_file():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
