"""The `hyperfl dp` command: convert between noise and epsilon, and print what a node's uploads have spent."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.table import Table

from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.launch.console import out
from hyperfl_flwr.privacy.coverage import ACCOUNTANTS, NEVER_COVERED, OWN_MODEL, RECORD_ACCOUNTANT, TRUSTED

if TYPE_CHECKING:
    from hyperfl_flwr.privacy.accounting import Noise

budgets = typer.Typer()

REPEATED = "rounds that are repeated, which take other noise and count again"
"""What the epsilon of a plan does not cover."""

HOLDS = {
    "server": "against all but the server, which adds the noise",
    "sum": "against the server and at most max-colluding nodes that help it",
    "local": "against all, also the server",
}
"""Against whom a guarantee for clients holds, by where the noise is added."""


@dataclass(frozen=True, kw_only=True)
class _Answer:
    """Noise and budget that belong together.

    Attributes:
        epsilon: The budget.
        noise_multiplier: The noise.
        facts: What the epsilon means and does not cover, by name.
    """

    epsilon: float
    noise_multiplier: float
    facts: Mapping[str, str]


@budgets.command()
def dp(
    unit: Annotated[str, typer.Option(help="What is protected: record or client.")] = "record",
    epsilon: Annotated[float | None, typer.Option(help="Budget; prints the noise multiplier that it needs.")] = None,
    noise_multiplier: Annotated[
        float | None,
        typer.Option(help="Noise in units of the clipping norm; prints the epsilon that it gives."),
    ] = None,
    delta: Annotated[float, typer.Option(help="Probability with which the bound may fail.")] = 1e-5,
    samples: Annotated[int | None, typer.Option(help="For records: number of the client's training samples.")] = None,
    batch: Annotated[int | None, typer.Option(help="For records: expected size of a batch.")] = None,
    steps: Annotated[int | None, typer.Option(help="For records: number of local steps in all rounds.")] = None,
    rounds: Annotated[int | None, typer.Option(help="For clients: number of rounds in which one takes part.")] = None,
    noise: Annotated[
        str | None, typer.Option(help="For clients: where noise is added, server, sum or local (see privacy.noise).")
    ] = None,
    spent: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A node's privacy.jsonl: print the budget that it has spent.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compute the noise for a budget of differential privacy, or the budget that noise or a node's uploads spend.

    For example `hyperfl dp --epsilon 4 --samples 600 --batch 50 --steps 600`.
    """
    from hyperfl_flwr.config.privacy import LARGEST_DELTA

    if not 0 < delta <= LARGEST_DELTA:
        raise ConfigError(f"--delta must be above 0 and at most {LARGEST_DELTA:g}, got {delta}")
    of_record = {"--samples": samples, "--batch": batch, "--steps": steps}
    of_client = {"--rounds": rounds, "--noise": noise}
    if spent is not None:
        refuse_options(
            "--spent", {"--epsilon": epsilon, "--noise-multiplier": noise_multiplier, **of_record, **of_client}
        )
        _print_spent(spent.absolute(), delta, as_json=as_json)
        return
    if unit not in ("record", "client"):
        raise ConfigError(f"--unit must be record or client, got {unit!r}")
    if (epsilon is None) == (noise_multiplier is None):
        raise ConfigError("give either --epsilon or --noise-multiplier; the other one is computed")
    needed, other = (of_record, of_client) if unit == "record" else (of_client, of_record)
    refuse_options(f"--unit {unit}", other)
    if missing := [name for name, value in needed.items() if value is None]:
        raise ConfigError(f"--unit {unit} also needs {', '.join(missing)}")
    try:
        if unit == "record":
            answer = _for_records(epsilon, noise_multiplier, delta, *(cast(int, value) for value in of_record.values()))
        else:
            answer = _for_clients(epsilon, noise_multiplier, delta, rounds or 0, noise or "")
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if as_json:
        numbers = {"epsilon": answer.epsilon, "delta": delta, "noise_multiplier": answer.noise_multiplier}
        out.print(json.dumps({name: _finite(value) for name, value in numbers.items()}), markup=False)
        return
    numbers = {"noise multiplier": answer.noise_multiplier, "epsilon": answer.epsilon, "delta": delta}
    shown = {name: _shown(value) for name, value in numbers.items()}
    for name, text in {**shown, **answer.facts}.items():
        out.print(f"{name:<18}{text}", markup=False)


def _for_records(
    epsilon: float | None, noise_multiplier: float | None, delta: float, samples: int, batch: int, steps: int
) -> _Answer:
    """Return noise and epsilon of noisy steps on Poisson batches; one of the two is given."""
    from hyperfl_flwr.privacy.accounting import central_limit_epsilon, record_epsilon, record_noise

    if min(samples, batch, steps) < 1:
        raise ValueError(f"--samples, --batch and --steps must be at least 1, got {samples}, {batch} and {steps}")
    rate = min(1.0, batch / samples)
    noise = noise_multiplier if epsilon is None else record_noise(epsilon, delta, rate, steps)
    assert noise is not None
    return _Answer(
        epsilon=record_epsilon(noise, rate, steps, delta) if epsilon is None else epsilon,
        noise_multiplier=noise,
        facts={
            "unit": "one record of a client, present or without effect; the number of records is public",
            "holds": "against all, also the server, for all parameters that the client sends in the run",
            "horizon": f"{steps} steps on Poisson batches with sample rate {rate:.4g}",
            "accountant": RECORD_ACCOUNTANT if rate < 1 else ACCOUNTANTS["local"],
            "central limit": f"{_shown(central_limit_epsilon(noise, rate, steps, delta))}, which is no bound",
            "not covered": "; ".join((*NEVER_COVERED, REPEATED)),
        },
    )


def _for_clients(
    epsilon: float | None, noise_multiplier: float | None, delta: float, rounds: int, noise: str
) -> _Answer:
    """Return noise and epsilon of noisy sums; one of the two is given."""
    from hyperfl_flwr.privacy.accounting import client_epsilon, client_noise

    if noise not in HOLDS:
        raise ValueError(f"--noise must be server, sum or local, got {noise!r}")
    if rounds < 1:
        raise ValueError(f"--rounds must be at least 1, got {rounds}")
    where = cast("Noise", noise)
    multiplier = noise_multiplier if epsilon is None else client_noise(epsilon, delta, rounds, where)
    assert multiplier is not None
    return _Answer(
        epsilon=client_epsilon(multiplier, rounds, delta, where) if epsilon is None else epsilon,
        noise_multiplier=multiplier,
        facts={
            "unit": "all that a client contributes, or nothing; the number of clients is public",
            "holds": HOLDS[noise],
            "horizon": f"{rounds} rounds in which the client takes part",
            "accountant": ACCOUNTANTS[noise],
            "not covered": "; ".join((*NEVER_COVERED, REPEATED, OWN_MODEL, *TRUSTED[noise])),
        },
    )


def _print_spent(path: Path, delta: float, *, as_json: bool) -> None:
    """Print what the clients of a record have spent: a row for each run, and one for all runs of a client.

    With several clients, a last row has the sum that counts if all are the same data, an owner's file or folder.
    """
    from hyperfl_flwr.privacy.budget import read_record
    from hyperfl_flwr.privacy.spent import spent, spent_together

    record = read_record(path)
    rows = spent(record, delta)
    if len({row.client for row in rows}) > 1:
        rows.append(spent_together(record, delta))
    if as_json:
        found = [
            {name: _finite(value) if isinstance(value, float) else value for name, value in asdict(row).items()}
            for row in rows
        ]
        out.print(json.dumps({"delta": delta, "spent": found}, indent=2), markup=False)
        return
    table = Table("client", "run", "releases", "epsilon of a record", "epsilon of the client", "bounded by")
    for row in rows:
        epsilons = (_shown(row.record_epsilon), _shown(row.client_epsilon))
        client = "all, if the same data" if row.client is None else str(row.client)
        table.add_row(client, row.experiment or "all runs", str(row.releases), *epsilons, row.bounded_by)
    out.print(table)
    each = [(row.record_epsilon, row.client_epsilon) for row in rows if row.client is not None]
    if each:
        largest = [max(values) for values in zip(*each, strict=True)]
        out.print(f"largest of single clients: {_shown(largest[0])} for a record, {_shown(largest[1])} for the client")
    out.print(f"delta {delta:g}; neighbours: one record, or one client, present or without effect", markup=False)
    if any(row.replaces for row in rows):
        out.print("descriptors: one record replaced; this bounds a removed one, too, if the number of records is known")
    out.print("bounded by nothing: no noise; server: noise that the server adds", markup=False)
    out.print(f"not covered: {'; '.join(NEVER_COVERED)}", markup=False)


def refuse_options(option: str, others: Mapping[str, object]) -> None:
    """Refuse options that cannot be given with another one.

    Args:
        option: The other option.
        others: The options and their values, None if not given.

    Raises:
        ConfigError: Naming those that are given.
    """
    if given := [name for name, value in others.items() if value is not None]:
        raise ConfigError(f"{', '.join(given)} cannot be given with {option}; leave one of them out")


def _finite(value: float) -> float | None:
    """Return a number as JSON has it: null stands for infinity."""
    return value if math.isfinite(value) else None


def _shown(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else "infinite"
