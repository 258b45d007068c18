"""Resolve the settings that are `auto`.

The numbers that affect training (`training_autos`) depend only on the method and on other settings. `resolved` fills
them in on the server and on every node before training, so that both sides agree without a message. All other `auto`
settings depend on the machine, the nodes and the data; `resolution` lists both kinds for the manifest.
"""

import contextlib
import textwrap
from collections.abc import Mapping
from typing import Any

from hyperfl_flwr.app.methods import strategy_of
from hyperfl_flwr.app.robust_reductions import asked_nodes
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.core.similar_names import nearest
from hyperfl_flwr.data.registry import class_names
from hyperfl_flwr.methods import METHODS
from hyperfl_flwr.protocol.messages import printable
from hyperfl_flwr.server.federation import Federation

LONGEST = 40
"""Largest number of characters of a value in the line of `resolution_text`."""


def resolved(config: RunConfig) -> RunConfig:
    """Return the settings with a number for every `auto` that affects training."""
    # The learning rate first: the strategy may derive its own settings from it.
    config = _filled(config, {"learning-rate": METHODS[config.method].learning_rate})
    strategy = strategy_of(config.method)
    return _filled(config, _automatic(strategy.automatic(config), config, f"{strategy.__name__}.automatic"))


def _automatic(numbers: object, config: RunConfig, function: str) -> Mapping[str, Scalar]:
    """Return what `automatic` has returned; refuse what a method of the user's own may return by mistake."""
    if not isinstance(numbers, Mapping):
        raise ConfigError(f"{function} must return a dictionary of settings and their numbers, got {numbers!r}")
    known = config.flat()
    if unknown := next((key for key in numbers if key not in known), None):
        raise ConfigError(
            f"{function} returns {unknown}, which is no setting{nearest(str(unknown), known)}; name settings as "
            f"`--set` does"
        )
    return numbers


def _filled(config: RunConfig, numbers: Mapping[str, Scalar]) -> RunConfig:
    flat = config.flat()
    chosen = {key: value for key, value in numbers.items() if flat[key] == "auto"}
    return RunConfig.from_flat(flat | chosen) if chosen else config


def replaced(config: RunConfig, found: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of some values, by key, that replace `auto` in the settings."""
    given = config.flat()
    return {key: value for key, value in found.items() if given[key] == "auto" and value not in ("auto", "")}


def resolution(config: RunConfig, federation: Federation, *, num_nodes: int, min_nodes: int) -> dict[str, Any]:
    """Return the value of each setting that is `auto`, by its key, and the number of nodes and threads.

    A deployment's nodes choose their threads, and do not report how they read their data. Values that the server does
    not know are left out, as are the settings of other methods.

    Args:
        config: The settings before resolution.
        federation: The nodes that have answered the handshake.
        num_nodes: Number of nodes P, including missing ones.
        min_nodes: Number of nodes that a round needs.
    """
    found: dict[str, Any] = {**resolved(config).flat(), "min-nodes": min_nodes}
    found["device"] = ", ".join(sorted({str(node.properties["device"]) for node in federation.nodes}))
    found |= _data(config, federation)
    if config.adversary.attack != "none":
        malicious = config.adversary.malicious_nodes(config.seed, num_nodes)
        found["adversary.nodes"] = ",".join(map(str, malicious)) or "none"
    if config.secagg.enabled:
        found |= _secure_sums(config, federation, num_nodes)
    if config.robust.is_robust:
        found["robust.byzantine"] = config.robust.byzantine_of(asked_nodes(config, min(num_nodes, config.num_clients)))
    chosen = replaced(config, found)
    threads = federation.nodes[0].properties.get("threads")  # of each process of a simulation
    return {"num-nodes": num_nodes, **({"threads": threads} if threads else {}), **chosen}


def _secure_sums(config: RunConfig, federation: Federation, num_nodes: int) -> dict[str, Any]:
    """Return the settings of secure sums, by key; without the threshold if not all nodes can be in one sum."""
    secagg = config.secagg
    found: dict[str, Any] = {
        "secagg.colluding": secagg.colluding_of(num_nodes),
        "secagg.max-examples": secagg.max_examples_of(federation.num_examples.values()),
    }
    with contextlib.suppress(ConfigError):
        found["secagg.threshold"] = secagg.threshold_of(num_nodes, min(num_nodes, config.num_clients))
    return found


def _data(config: RunConfig, federation: Federation) -> dict[str, Any]:
    """Return the data settings that follow from the nodes' reports, by key."""
    reports, sizes = [node.properties for node in federation.nodes], federation.num_examples
    tests = {client: sum(counts) for client, counts in federation.label_counts().get("test", {}).items()}
    names = next((report["classes"] for report in reports if report.get("classes")), None)
    found = {
        "data.train-samples": _sizes(sizes, config.num_clients),
        "data.test-samples": _sizes(tests, config.num_clients),
        "data.classes": ",".join(names or class_names(config.dataset, federation.num_classes)),
        "data.input-shape": "x".join(map(str, federation.input_shape)),
    }
    simulation_settings = {
        "data.augmentation": "augmentation",
        "data.normalisation": "normalisation",
        "data.target-scale": "target-scale",
    }
    return found | {key: reports[0].get(name, "") for key, name in simulation_settings.items()}


def _sizes(sizes: Mapping[int, int], num_clients: int) -> int | str:
    """Return the number of samples of each trained client, as a number or a range; empty if unknown."""
    known = {size for client, size in sizes.items() if client < num_clients}
    return "" if not known else max(known) if len(known) == 1 else f"{min(known)} to {max(known)}"


def resolution_text(chosen: Mapping[str, Any]) -> str:
    """Format the result of `resolution` as one line for the log."""
    texts = {
        key: printable(str(value).lower() if isinstance(value, bool) else str(value).replace(",", ", "))
        for key, value in chosen.items()
    }  # some texts come from nodes, which are untrusted
    return f"resolved settings: {'; '.join(f'{key} {textwrap.shorten(text, LONGEST)}' for key, text in texts.items())}"
