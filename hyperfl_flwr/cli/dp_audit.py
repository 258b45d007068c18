"""The `hyperfl dp-audit` command: test a stated epsilon by a membership game on the noisy steps."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated

import typer

from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.launch.console import err, out

games = typer.Typer()


@games.command("dp-audit")
def run_dp_audit(
    epsilon: Annotated[
        float, typer.Option(help="The stated epsilon for one record, which the noise follows from.")
    ] = 4.0,
    delta: Annotated[float, typer.Option(help="The stated delta.")] = 1e-5,
    canaries: Annotated[int, typer.Option(help="Number of canaries, which are all samples of the training.")] = 2000,
    batch: Annotated[int, typer.Option(help="Expected size of a batch.")] = 400,
    steps: Annotated[int, typer.Option(help="Number of steps.")] = 200,
    confidence: Annotated[float, typer.Option(help="Probability with which the lower bound holds.")] = 0.95,
    break_: Annotated[
        str,
        typer.Option("--break", metavar="noise", help="noise: add a tenth of the noise, to see the audit notice it."),
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> None:
    """Play a membership game on noisy steps and compare its lower bound with the stated epsilon.

    It checks the noisy steps and their accounting, not preprocessing, metrics, rounds or private classifiers. Exit code
    1 if the bound is above the stated epsilon: then the noise or its accounting is wrong.
    """
    from hyperfl_flwr.audit.membership import BROKEN, Game, lower_bound, play
    from hyperfl_flwr.privacy.accounting import record_noise

    if break_ not in ("", "noise"):
        raise ConfigError(f"--break must be noise, got {break_!r}")
    if not 0 < confidence < 1:
        raise ConfigError(f"--confidence must be above 0 and below 1, got {confidence}")
    if min(canaries, batch) < 1:
        raise ConfigError(f"--canaries and --batch must be at least 1, got {canaries} and {batch}")
    try:
        noise = record_noise(epsilon, delta, min(1.0, batch / canaries), steps)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    game = Game(canaries=canaries, batch_size=batch, steps=steps, noise_multiplier=noise, broken=bool(break_))
    guesses = play(game)
    bound = lower_bound(guesses, delta, confidence)
    largest = lower_bound(replace(guesses, correct=guesses.made), delta, confidence)
    if as_json:
        document = {
            "unit": "record", "epsilon": epsilon, "delta": delta, "noise_multiplier": noise,
            "noise_divided_by": BROKEN if break_ else 1.0, "steps": steps, "canaries": canaries,
            "guesses": guesses.made, "correct": guesses.correct, "confidence": confidence,
            "lower_bound": bound, "largest_bound": largest, "refuted": bound > epsilon,
        }  # fmt: skip
        out.print(json.dumps(document), markup=False)
    else:
        divided = f", divided by {BROKEN:g}" if break_ else ""
        stated = f"epsilon {epsilon:g} at delta {delta:g} for one record, noise multiplier {noise:.4g}{divided}"
        played = f"{canaries} canaries, {steps} steps, {guesses.correct} of {guesses.made} guesses correct"
        out.print(f"stated        {stated}\ngame          {played}", markup=False)
        verdict = "refuted: the noise or its accounting is wrong" if bound > epsilon else "not refuted"
        out.print(f"lower bound   epsilon {bound:.3g} with confidence {confidence:g}: {verdict}", markup=False)
        if largest <= epsilon:
            err.print(f"warning: with {canaries} canaries the bound is at most {largest:.3g}; give more --canaries")
    if bound > epsilon:
        raise typer.Exit(1)
