"""Sentences about the result of a run, for the log, the page and comparisons."""

from collections.abc import Mapping
from typing import Any

from hyperfl_flwr.core.plurals import counted
from hyperfl_flwr.core.tasks import CLASSIFICATION, task_of
from hyperfl_flwr.runs.run_directory import is_simulation

FEWEST_SHARES = 5
"""Number of nodes in the list of those that counted least in a robust reduction."""

FALLEN = 0.01
"""Least fall of a mean accuracy since its best round that is worth a warning, a share."""


def majority_text(summary: Mapping[str, Any]) -> str:
    """Return a warning if the models are no better than always saying a client's most common class; else nothing."""
    task = task_of(summary)
    accuracy, share = summary[task.key("test_accuracy")], summary.get("test_majority_share")
    if accuracy is None or share is None or accuracy > share or share == 1:
        return ""
    said = "each client's most common class" if task is CLASSIFICATION else "what is most common at each client"
    return (
        f"the personalized accuracy, {100 * accuracy:.2f} %, is not above {100 * share:.2f} %, that of always saying "
        f"{said}"
    )


def fall_text(summary: Mapping[str, Any]) -> str:
    """Return a warning if the mean personalized score of the same clients was higher in an earlier round; else nothing.

    Rounds of other clients, which were drawn or of which some failed, have other means for that reason alone.
    """
    task = task_of(summary)
    best, last, error = (summary[task.key(name)] for name in ("best_accuracy", "test_accuracy", "test_accuracy_sem"))
    if best is None or last is None or best - last < FALLEN or summary["keep"] == "best":
        return ""
    number = summary[task.key("test_accuracy_num_clients")]
    if error is not None or summary.get("best_num_clients", number) != number:
        return ""
    return (
        f"the mean personalized {task.score_title} was highest after round {summary['best_round']}, {task.text(best)}, "
        f"and has fallen to {task.text(last)}; a smaller num-rounds or learning-rate may be better, or keep = best, "
        f"which chooses the round on validation data (data.validation-fraction)"
    )


def malicious_text(manifest: Mapping[str, Any]) -> str:
    """Return which nodes of a simulation were malicious, and how; empty if none was.

    Args:
        manifest: Content of manifest.json.
    """
    settings = manifest["settings"]
    if (attack := settings.get("adversary.attack", "none")) == "none":
        return ""
    given = settings["adversary.nodes"]
    numbers = str(manifest.get("resolved", {}).get("adversary.nodes", "none") if given == "auto" else given)
    return "" if numbers == "none" else f"{numbers.replace(',', ', ')} ({attack})"


def shares_text(summary: Mapping[str, Any]) -> str:
    """Return the nodes that counted least in a robust reduction, with their mean shares; empty if these are unknown."""
    least = sorted(summary.get("node_shares", {}).items(), key=lambda item: float(item[1]))[:FEWEST_SHARES]
    return ", ".join(f"node {node} ({share:.2g})" for node, share in least)


def secure_sums_text(manifest: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    """Describe the secure sums of a run: what the server has seen, threshold, nodes and seconds."""
    known = {**manifest["settings"], **manifest.get("resolved", {})}
    threshold, colluding = (known[f"secagg.{name}"] for name in ("threshold", "colluding"))
    opening = summary["unmask_seconds_per_round"]
    parts = [
        "The server has opened sums over the clients of all nodes only, of parameters and of metrics.",
        f"With {counted(summary['num_nodes'], 'node')} present, {threshold} had to answer to open a sum; at most "
        f"{colluding} of them were assumed to collude with the server.",
        "No sum was opened." if opening is None else f"UNMASK took {opening:.3f} s in a round (median).",
        "Numbers of single clients are not known.",
    ]
    if summary["saturated"]:
        parts.append(f"{summary['saturated']:,} values were beyond secagg.range, and were cut off there.")
    if is_simulation(manifest):
        parts.append("This was a simulation, which hides nothing: all nodes and the server ran on one machine.")
    return " ".join(parts)
