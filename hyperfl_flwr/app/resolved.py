"""What `auto` becomes in a run.

The numbers that decide what is trained (`TRAINING_AUTOS`) depend on the method and on other settings alone. `resolved`
puts them in, on the server and on every node before anything trains, so that both sides agree without a message. All
other autos follow from the machine, the nodes and the data; `resolution` lists both kinds for the manifest.
"""

import textwrap
from collections.abc import Mapping
from typing import Any

from hyperfl_flwr.app.methods import strategy_of
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.data.registry import class_names
from hyperfl_flwr.methods import METHODS
from hyperfl_flwr.protocol.messages import printable
from hyperfl_flwr.server.federation import Federation

LONGEST = 40
"""Characters of a value that `in_words` shows."""


def resolved(config: RunConfig) -> RunConfig:
    """Return settings in which a number stands in the place of every `auto` that decides what the method trains."""
    config = _filled(config, {"learning-rate": METHODS[config.method].learning_rate})
    return _filled(config, strategy_of(config.method).automatic(config))


def _filled(config: RunConfig, numbers: Mapping[str, Scalar]) -> RunConfig:
    flat = config.flat()
    return RunConfig.from_flat(flat | {key: value for key, value in numbers.items() if flat[key] == "auto"})


def resolution(config: RunConfig, federation: Federation, *, num_nodes: int, min_nodes: int) -> dict[str, Any]:
    """Return what every `auto` among a run's settings became, by the setting's key, the number of nodes and threads.

    A deployment's nodes choose their threads, and do not report how they read their data: what the server does not know
    is left out, as are the settings of other methods.

    Args:
        config: The settings as they were asked for.
        federation: The nodes that have answered.
        num_nodes: Number of nodes P, those that are missing included.
        min_nodes: How many of them a round needs.
    """
    asked = config.flat()
    found: dict[str, Any] = {**resolved(config).flat(), "min-nodes": min_nodes}
    found["device"] = ", ".join(sorted({str(node.properties["device"]) for node in federation.nodes}))
    found |= _data(config, federation)
    chosen = {key: value for key, value in found.items() if asked[key] == "auto" and value not in ("auto", "")}
    threads = federation.nodes[0].properties.get("threads")  # of each process of a simulation
    return {"num-nodes": num_nodes, **({"threads": threads} if threads else {}), **chosen}


def _data(config: RunConfig, federation: Federation) -> dict[str, Any]:
    """Return what the nodes report of their data, by the settings' keys."""
    told, sizes = [node.properties for node in federation.nodes], federation.num_examples
    tests = {client: sum(counts) for client, counts in federation.label_counts().get("test", {}).items()}
    names = next((each["classes"] for each in told if each.get("classes")), None)
    found = {
        "data.train-samples": _sizes(sizes, config.num_clients),
        "data.test-samples": _sizes(tests, config.num_clients),
        "data.classes": ",".join(names or class_names(config.dataset, federation.num_classes)),
        "data.input-shape": "x".join(map(str, federation.input_shape)),
    }
    of_simulations = {"data.augmentation": "augmentation", "data.normalisation": "normalisation"}
    return found | {key: told[0].get(name, "") for key, name in of_simulations.items()}


def _sizes(sizes: Mapping[int, int], num_clients: int) -> int | str:
    """Return the number of samples that all trained clients have, or the least and the largest; empty if unknown."""
    known = {size for client, size in sizes.items() if client < num_clients}
    return "" if not known else max(known) if len(known) == 1 else f"{min(known)} to {max(known)}"


def in_words(chosen: Mapping[str, Any]) -> str:
    """Return what `resolution` has found as one line."""
    texts = {
        key: printable(str(value).replace(",", ", ")) for key, value in chosen.items()
    }  # some are the nodes' words
    return f"resolved settings: {'; '.join(f'{key} {textwrap.shorten(text, LONGEST)}' for key, text in texts.items())}"
