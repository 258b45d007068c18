"""Run an attack on clients with different target networks: on those of each network, with what is known of it."""

from collections.abc import Sequence
from dataclasses import replace

from hyperfl_flwr.attacks.base import AttackSettings, Reconstruction
from hyperfl_flwr.attacks.registry import Attack
from hyperfl_flwr.audit.readable import run_on_readable
from hyperfl_flwr.audit.record_round import AttackedRound, View


def check_knowledge(target: AttackedRound) -> None:
    """Check that the attacks support the data and the network of every attacked client.

    Raises:
        ConfigError: If they do not.
    """
    for client in target.clients[: len(target.config.targets)]:
        target.knowledge(client)


def run_by_network(
    target: AttackedRound, row: Attack, settings: AttackSettings, seen: View
) -> Sequence[Reconstruction]:
    """Run an attack on the observations of a round, once for each target network.

    Args:
        target: The attacked round.
        row: The attack.
        settings: Its settings, for all clients.
        seen: The attacker's view of the round, with the knowledge of the first client's network.

    Returns:
        The results in the order of the clients; of a sum, which has one network, in any order. See `run_on_readable`
        for clients in whose replies there is nothing to read.
    """
    names = [target.config.of_client(client).target for client in target.clients]
    if len(set(names)) == 1:
        return run_on_readable(row, seen.observations, target.clients, seen.knowledge, settings)
    found: dict[int, Reconstruction] = {}
    for name in dict.fromkeys(names):
        rows = [position for position, other in enumerate(names) if other == name]
        labels = None if settings.labels is None else [settings.labels[position] for position in rows]
        observations = [seen.observations[position] for position in rows]
        clients = [target.clients[position] for position in rows]
        knowledge = target.knowledge(clients[0])
        results = run_on_readable(row, observations, clients, knowledge, replace(settings, labels=labels))
        found |= dict(zip(rows, results, strict=True))
    return [found[position] for position in range(len(names))]
