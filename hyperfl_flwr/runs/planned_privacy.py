"""Say what a run is about to spend of its clients' privacy, before its first round."""

import math

from hyperfl_flwr.config.run_config import RunConfig, has_private_classifier
from hyperfl_flwr.core.plurals import counted
from hyperfl_flwr.privacy.accounting import client_epsilon
from hyperfl_flwr.privacy.coverage import PROMISES_NOTHING
from hyperfl_flwr.runs.privacy_statement import OF_PUBLISHED_HEADS


def planned(config: RunConfig, weights: int = 0) -> list[str]:
    """Return what a run is about to spend, in a line, and warnings about it; empty without a unit.

    Args:
        config: The run's settings.
        weights: Number of numbers in an upload, for methods whose clients randomise each of them.
    """
    if config.weight_epsilon:
        each, total = config.weight_epsilon, config.weight_epsilon * weights * config.num_rounds
        return [
            f"privacy: planned epsilon {total:.2f} of clients over {counted(config.num_rounds, 'round')}: "
            f"{each:g} for each of {weights} weights and round; {PROMISES_NOTHING}"
        ]
    privacy, rounds, found = config.privacy, config.num_rounds, math.inf
    if privacy.protects_clients:
        unit, delta = "client", privacy.delta
        if privacy.noise_multiplier:
            found = client_epsilon(privacy.noise_multiplier, rounds, delta, privacy.noise)
    elif config.dp.epsilon and config.dp.heads == "published" and has_private_classifier(config.method):
        return [f"privacy: no epsilon of records holds: {OF_PUBLISHED_HEADS}"]
    elif config.dp.epsilon:
        unit, delta, found = "record", config.dp.delta, config.dp.epsilon
    else:
        return []
    lines = [f"privacy: planned epsilon {found:.2f} at delta {delta:g} of {unit}s over {counted(rounds, 'round')}"]
    if not math.isfinite(found):
        lines.append("warning: the planned epsilon is infinite; set a larger privacy.noise-multiplier")
    if unit == "client" and delta > 1 / config.num_clients:
        lines.append(
            f"warning: privacy.delta = {delta:g} is above 1 / {config.num_clients} clients, which allows one client to "
            f"be published whole; set a smaller one"
        )
    return lines
