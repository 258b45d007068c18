"""Numbers of a round by their names in metrics.jsonl."""

from typing import Any

from hyperfl_flwr.protocol.messages import ClientResult
from hyperfl_flwr.runs.run_directory import Record
from strategies.engine.round_outcome import Outcome


def renamed(result: ClientResult, drop: str = " ") -> dict[str, Any]:
    """Return one client's numbers by their names in metrics.jsonl, without those that start with `drop`."""
    numbers = {name.replace("-", "_"): value for name, value in result.metrics.items() if not name.startswith(drop)}
    return {"client": result.client, "num_examples": result.num_examples, **numbers}


def means_of(outcome: Outcome, drop: str = " ") -> dict[str, float]:
    """Return means over clients by their names in metrics.jsonl, and standard deviations where only sums are known.

    Times and counts are left out, since only their sums are meaningful.
    """
    numbers = outcome.means()
    if outcome.tally is not None:
        numbers |= {f"{name}-std": value for name, value in outcome.tally.stds.items()}
    kept = {name: value for name, value in numbers.items() if not name.startswith(drop)}
    return {name.replace("-", "_"): value for name, value in kept.items() if not name.endswith(("seconds", "examples"))}


def seconds_of(outcome: Outcome) -> Record:
    """Return the clients' seconds or, with secure sums, those of the opening, and the number of saturated values."""
    if outcome.tally is not None:
        return {"unmask_seconds": outcome.unmask_seconds, "saturated": outcome.tally.saturated}
    return {"client_seconds": sum(result.metrics.get("seconds", 0.0) for result in outcome.results)}
