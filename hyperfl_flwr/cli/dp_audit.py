"""The `hyperfl dp-audit` command: test a stated epsilon by a membership game on the mechanism that is trained with."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, cast

import typer

from hyperfl_flwr.cli.dp import refuse_options
from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.launch.console import err, out

if TYPE_CHECKING:
    from hyperfl_flwr.audit.membership.dp_games import Game

games = typer.Typer()


@games.command("dp-audit")
def run_dp_audit(
    unit: Annotated[
        str,
        typer.Option(help="What is protected: record (noisy local steps) or client (clipping and noise of uploads)."),
    ] = "record",
    epsilon: Annotated[float, typer.Option(help="The stated epsilon, which the noise follows from.")] = 4.0,
    delta: Annotated[float, typer.Option(help="The stated delta.")] = 1e-5,
    canaries: Annotated[int, typer.Option(help="Number of canaries, which are all samples, or all clients.")] = 2000,
    batch: Annotated[int | None, typer.Option(help="For records: expected size of a batch; default 400.")] = None,
    steps: Annotated[int | None, typer.Option(help="For records: number of steps; default 200.")] = None,
    rounds: Annotated[int | None, typer.Option(help="For clients: number of rounds; default 10.")] = None,
    noise: Annotated[
        str | None,
        typer.Option(help="For clients: where noise is added, server, sum or local (see privacy.noise); default sum."),
    ] = None,
    confidence: Annotated[float, typer.Option(help="Probability with which the lower bound holds.")] = 0.95,
    break_: Annotated[
        str,
        typer.Option("--break", metavar="noise", help="noise: add a tenth of the noise, to see the audit notice it."),
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> None:
    """Test a stated epsilon: compare it with the lower bound that a membership game finds.

    It checks clipping, noise and their accounting, not preprocessing, metrics, rounds that are repeated or private
    classifiers. Exit code 1 if the bound is above the stated epsilon: then the noise or its accounting is wrong.
    """
    from hyperfl_flwr.audit.membership.dp_games import BROKEN, lower_bound

    if break_ not in ("", "noise"):
        raise ConfigError(f"--break must be noise, got {break_!r}")
    if not 0 < confidence < 1:
        raise ConfigError(f"--confidence must be above 0 and below 1, got {confidence}")
    if unit not in ("record", "client"):
        raise ConfigError(f"--unit must be record or client, got {unit!r}")
    try:
        if unit == "record":
            refuse_options("--unit record", {"--rounds": rounds, "--noise": noise})
            game = _of_records(epsilon, delta, canaries, _or(batch, 400), _or(steps, 200), broken=bool(break_))
        else:
            refuse_options("--unit client", {"--batch": batch, "--steps": steps})
            game = _of_clients(epsilon, delta, canaries, _or(rounds, 10), noise or "sum", broken=bool(break_))
    except ValueError as error:
        raise ConfigError(str(error)) from None
    guesses = game.play()
    bound = lower_bound(guesses, delta, confidence)
    largest = lower_bound(replace(guesses, correct=guesses.made), delta, confidence)
    if as_json:
        document = {
            "unit": unit, "epsilon": epsilon, "delta": delta, "noise_multiplier": game.noise_multiplier,
            "noise_divided_by": BROKEN if break_ else 1.0, **game.length, "canaries": canaries,
            "guesses": guesses.made, "correct": guesses.correct, "confidence": confidence,
            "lower_bound": bound, "largest_bound": largest, "refuted": bound > epsilon,
        }  # fmt: skip
        out.print(json.dumps(document), markup=False)
    else:
        divided = f", divided by {BROKEN:g}" if break_ else ""
        stated = f"epsilon {epsilon:g} at delta {delta:g} for one {unit}, noise multiplier {game.noise_multiplier:.4g}"
        length = ", ".join(f"{number} {name}" for name, number in game.length.items())
        played = f"{canaries} canaries, {length}, {guesses.correct} of {guesses.made} guesses correct"
        out.print(f"stated        {stated}{divided}\ngame          {played}", markup=False)
        verdict = "refuted: the noise or its accounting is wrong" if bound > epsilon else "not refuted"
        out.print(f"lower bound   epsilon {bound:.3g} with confidence {confidence:g}: {verdict}", markup=False)
        if largest <= epsilon:
            err.print(f"warning: with {canaries} canaries the bound is at most {largest:.3g}; give more --canaries")
    if bound > epsilon:
        raise typer.Exit(1)


def _or(given: int | None, default: int) -> int:
    return default if given is None else given


def _of_records(epsilon: float, delta: float, canaries: int, batch: int, steps: int, *, broken: bool) -> Game:
    from hyperfl_flwr.audit.membership.record_game import RecordGame
    from hyperfl_flwr.privacy.accounting import record_noise

    if min(canaries, batch) < 1:
        raise ValueError(f"--canaries and --batch must be at least 1, got {canaries} and {batch}")
    noise = record_noise(epsilon, delta, min(1.0, batch / canaries), steps)
    return RecordGame(canaries=canaries, batch_size=batch, steps=steps, noise_multiplier=noise, broken=broken)


def _of_clients(epsilon: float, delta: float, canaries: int, rounds: int, noise: str, *, broken: bool) -> Game:
    from hyperfl_flwr.audit.membership.client_game import ClientGame
    from hyperfl_flwr.privacy.accounting import Noise, client_noise

    if noise not in ("server", "sum", "local"):
        raise ValueError(f"--noise must be server, sum or local, got {noise!r}")
    place = cast(Noise, noise)
    multiplier = client_noise(epsilon, delta, rounds, place)
    return ClientGame(canaries=canaries, rounds=rounds, noise_from=place, noise_multiplier=multiplier, broken=broken)
