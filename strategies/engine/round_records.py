"""Numbers of a round by their names in metrics.jsonl."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.plurals import counted
from hyperfl_flwr.core.process_memory import peak_memory
from hyperfl_flwr.core.tasks import MAIN_SCORES, Task
from hyperfl_flwr.protocol.messages import ClientResult
from hyperfl_flwr.runs.run_directory import Record
from hyperfl_flwr.server.roster import Roster
from strategies.engine.round_outcome import Outcome
from strategies.engine.sampling import standard_error

OF_THE_SERVER = frozenset(
    {
        "kind", "round", "phase", "client", "clients", "measured", "failed", "away", "num_examples", "drawn_from",
        "client_seconds", "unmask_seconds", "saturated", "node_shares", "bytes_down_per_client", "bytes_up_per_client",
        "bytes_on_wire", "peak_memory_mb",
    }
)  # fmt: skip
"""Names in metrics.jsonl of the server's own numbers, but for `seconds`, which a client reports of its own, too."""

_MODELS = {
    "aggregate": "the received model",
    "personalized": "the model after local training",
    "kept": "the best model",
}
"""The kinds of models that clients evaluate, for people."""

ERROR, DEVIATION = "_sem", "_std"
"""Ends of the names of a mean's standard error, and of the standard deviation over the clients."""


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
        numbers |= {name + DEVIATION: value for name, value in outcome.tally.stds.items()}
    kept = {name: value for name, value in numbers.items() if not name.startswith(drop)}
    return {name.replace("-", "_"): value for name, value in kept.items() if not name.endswith(("seconds", "examples"))}


def seconds_of(outcome: Outcome) -> Record:
    """Return the clients' seconds or, with secure sums, those of the opening, and the number of saturated values."""
    if outcome.tally is not None:
        return {"unmask_seconds": outcome.unmask_seconds, "saturated": outcome.tally.saturated}
    return {"client_seconds": sum(result.metrics.get("seconds", 0.0) for result in outcome.results)}


def costs_text(record: Record, rows: Sequence[Record]) -> str:
    """Say what a round of a deployment was spent on.

    Args:
        record: The round's line of metrics.jsonl.
        rows: The lines of its clients; none with secure sums.
    """
    trained = max((row["train_seconds"] for row in rows if "train_seconds" in row), default=None)
    training = "" if trained is None else f", in which a client trained for at most {trained:.1f} s"
    down, up = (1e-6 * record[f"bytes_{way}_per_client"] for way in ("down", "up"))
    return f"took {record['seconds']:.1f} s{training}; a client received {down:.1f} MB and sent {up:.1f} MB"


def errors_of(outcome: Outcome, population: int, drop: str = " ") -> Record:
    """Return the standard errors of the mean scores over clients that were drawn, and their population.

    The error of a number `NAME` is `NAME_sem`; a mean without a known error has none.

    Args:
        outcome: What the drawn clients reported.
        population: Number of clients that they were drawn from.
        drop: Start of the names that are left out.
    """
    found: dict[str, float | None] = {}
    for name, (deviation, number) in _deviations(outcome).items():
        if not name.startswith(drop):
            found[name.replace("-", "_") + ERROR] = standard_error(deviation, number, population)
    return {"drawn_from": population, **{name: value for name, value in found.items() if value is not None}}


def _deviations(outcome: Outcome) -> Mapping[str, tuple[float, int]]:
    """Return the standard deviation of each main score, and over how many clients; empty if it is not known."""
    if outcome.tally is not None:
        known, number = outcome.tally.stds, outcome.tally.clients
        return {name: (value, number) for name, value in known.items() if name.endswith(MAIN_SCORES)}
    found: dict[str, list[float]] = {}
    for result in outcome.results:
        for name, value in result.metrics.items():
            if name.endswith(MAIN_SCORES):  # a loss may be infinite
                found.setdefault(name, []).append(value)
    return {name: (statistics.pstdev(values), len(values)) for name, values in found.items()}


def remarks_on(outcome: Outcome, task: Task) -> Iterator[str]:
    """Yield warnings about what single clients have reported, of which nothing is known with secure sums."""
    if dead := [result.client for result in outcome.results if result.metrics.get("hidden-active-units") == 0]:
        yield (
            f"no hidden unit of the hypernetwork is active for the clients {dead}, which get the head bias as their "
            f"extractor; hyperfl.initialisation=hyperfan-bias avoids this"
        )
    for kind, model in _MODELS.items():
        # A report has no number that is not defined: here the loss, beside a score.
        score, loss = f"{kind}-{task.score}", f"{kind}-loss"
        if broken := [each.client for each in outcome.results if score in each.metrics and loss not in each.metrics]:
            yield f"outputs of {model} are not numbers for the clients {broken}; they count as wrong predictions"


def mean_text(record: Record, kind: str, asked: int, task: Task) -> str:
    """Return a record's mean score and number of clients as text; of drawn clients with error and population.

    Args:
        record: A line of metrics.jsonl about the clients of a round.
        kind: Kind of model, `personalized` or `aggregate`.
        asked: Number of clients that were to take part.
        task: The run's task.
    """
    name, finished = f"{kind}_{task.score}", record["clients"]
    score = f"{task.score_title} not known" if finished else "no client finished"
    if name in record:
        error = f" ± {record[name + ERROR]:.4f}" if name + ERROR in record else ""
        over = f" of {counted(record['measured'], 'client')}" if "measured" in record else ""
        score = f"{kind} {task.score_title} {record[name]:.4f}{error}{over}"
    drawn = f" drawn from {record['drawn_from']}" if "drawn_from" in record else ""
    if "measured" in record:
        return f"{score}{drawn}, {finished} of {asked} clients finished"
    return f"{score}, {finished} of {asked} clients{drawn}"


def asked(outcome: Outcome, config: RunConfig, server_round: int) -> int:
    """Return the number of clients that were to take part in a round."""
    missed = _lost(outcome) if not config.trains_all(server_round) else [*outcome.absent, *_lost(outcome)]
    return len(outcome.finished) + len(outcome.failures) + len(missed)


def nodes_text(roster: Roster | None) -> str:
    """Return the part of a round's line that lists a deployment's nodes; empty in a simulation."""
    if roster is None or roster.simulated:
        return ""
    here = " ".join(str(node.partition) for node in roster.federation.nodes)
    away = " ".join(map(str, roster.away))
    return f", nodes {here or 'none'}{f', away {away}' if away else ''}"


def _shares_of(outcome: Outcome) -> Record:
    """Return how much each node counted in a robust reduction, by its number; empty if that is not known."""
    shares = {str(node): share for node, share in outcome.node_shares.items()}
    return {"node_shares": shares} if shares else {}


def _measured(outcome: Outcome) -> Record:
    """Return the number of clients that the means are over; empty if it is that of all that finished."""
    return {} if outcome.measured == len(outcome.finished) else {"measured": outcome.measured}


def _lost(outcome: Outcome) -> list[int]:
    """Return the clients on nodes that went away during the round."""
    return [client for clients in outcome.away.values() for client in clients]


def training_records(
    outcome: Outcome, config: RunConfig, server_round: int, phase: str, seconds: float, population: int
) -> list[Record]:
    """Return the line about the training of a round, and a line for each client.

    Args:
        outcome: What the clients reported.
        config: The run's settings.
        server_round: The round.
        phase: Name of its training phase; empty if there is only one.
        seconds: Wall time of the round.
        population: Number of clients that those with numbers were drawn from.
    """
    may_be_last = config.last_round == "sampled" or config.early_stopping > 0
    is_drawn = may_be_last and not config.trains_all(server_round)
    record: Record = {
        "kind": "train",
        "round": server_round,
        **({"phase": phase} if phase else {}),
        "clients": len(outcome.finished),
        **_measured(outcome),
        "failed": sorted(failure.client for failure in outcome.failures),
        "away": sorted([*outcome.absent, *_lost(outcome)]),
        **means_of(outcome, drop="aggregate-"),
        **(errors_of(outcome, population, drop="aggregate-") if is_drawn else {}),
        "seconds": seconds,
        **seconds_of(outcome),
        **_shares_of(outcome),
        "bytes_down_per_client": outcome.bytes_down,
        "bytes_up_per_client": outcome.bytes_up,
        "bytes_on_wire": outcome.bytes_on_wire,
        "peak_memory_mb": (peak_memory() + sum(outcome.processes.values())) / 1e6,
    }
    rows = [renamed(result, drop="aggregate-") for result in outcome.results]
    return [record, *({"kind": "client", "round": server_round, **row} for row in rows)]


def aggregate_records(outcome: Outcome, after_round: int, population: int | None = None) -> list[Record]:
    """Return the lines about the global state after a round, which clients measure when they next receive it.

    Args:
        outcome: What the clients reported.
        after_round: The round.
        population: Number of clients that they were drawn from; None if their mean has no stated error.
    """
    return _records_of("aggregate", (), outcome, after_round, population)


def kept_records(outcome: Outcome, after_round: int, population: int | None = None) -> list[Record]:
    """Return the lines about the clients' best models, which they evaluate after the last round.

    Args:
        outcome: What the clients reported.
        after_round: The last round.
        population: Number of clients that they were drawn from; None if their mean has no stated error.
    """
    return _records_of("kept", ("test-examples", "majority-share"), outcome, after_round, population)


def _records_of(
    kind: str, of_data: Sequence[str], outcome: Outcome, after_round: int, population: int | None
) -> list[Record]:
    """Return the line with the means of a kind of model, and one for each client; `of_data` is added to the latter."""
    errors = {} if population is None else errors_of(outcome, population)
    means = {
        name: value for name, value in (means_of(outcome) | errors).items() if name.startswith((f"{kind}_", "drawn"))
    }
    record = {"kind": kind, "round": after_round, "clients": len(outcome.finished), **_measured(outcome), **means}
    rows = [
        ClientResult(
            client=result.client,
            num_examples=result.num_examples,
            metrics={
                name: value for name, value in result.metrics.items() if name.startswith(f"{kind}-") or name in of_data
            },
        )
        for result in outcome.results
    ]
    return [record, *({"kind": f"client-{kind}", "round": after_round, **renamed(row)} for row in rows)]
