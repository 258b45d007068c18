"""The checks of a node's owner, from the node config."""

from collections.abc import Callable

from clients.engine.node_checks import NodeChecks, Rule
from hyperfl_flwr.config.node_config import NodeConfig
from hyperfl_flwr.privacy.received_network import STATISTICS, Statistic


def checks_of(node: NodeConfig, note: Callable[[str], None]) -> NodeChecks:
    """Return the checks of a node; a simulated node, which has no owner, makes only those that its config names.

    Args:
        node: The node's config.
        note: Writes what a check has found to the node's ledger.
    """
    rules: dict[Statistic, Rule] = {}
    for statistic in STATISTICS:
        name = statistic.replace("-", "_")
        action = getattr(node, f"check_{name}")
        if action != "off" and (not node.simulated or f"check_{name}" in node.model_fields_set):
            rules[statistic] = Rule(action=action, limit=getattr(node, f"max_{name}"))
    return NodeChecks(
        rules=rules,
        min_samples=node.min_samples,
        min_steps=node.min_steps,
        min_test_samples=node.min_test_samples,
        note=note,
    )
