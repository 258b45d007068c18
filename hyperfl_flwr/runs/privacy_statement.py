"""State the differential privacy of a run: what holds for whom, and what it does not cover."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from hyperfl_flwr.config.run_config import has_private_classifier, randomises_weights
from hyperfl_flwr.config.table import default_settings
from hyperfl_flwr.core.errors import StateError
from hyperfl_flwr.core.packages.user_code import is_user_code
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.privacy.accounting import (
    Noise,
    central_limit_epsilon,
    client_epsilon,
    record_epsilon,
    record_noise,
)
from hyperfl_flwr.privacy.coverage import (
    ACCOUNTANTS,
    NEVER_COVERED,
    OWN_MODEL,
    PROMISES_NOTHING,
    RECORD_ACCOUNTANT,
    TRUSTED,
    WEIGHT_ACCOUNTANT,
)
from hyperfl_flwr.runs.listed_clients import known_sizes
from hyperfl_flwr.runs.releases import FILE, SumRelease, read_releases
from hyperfl_flwr.runs.run_directory import read_metrics, trained_settings
from hyperfl_flwr.runs.run_sources import method_of

REPEATED = "messages that were delivered twice, which only the nodes count (hyperfl dp --spent)"
"""What an epsilon does not cover where clients add the noise, and do not report how often."""

OF_PUBLISHED_HEADS = (
    "with dp.heads=published a record moves its client's classifier, and the classifier moves the gradients of all "
    "other records, which are clipped one by one"
)
"""Why no epsilon holds for methods that train their classifiers without noise."""


@dataclass(frozen=True, kw_only=True)
class PrivacyStatement:
    """The entry `privacy` of summary.json.

    Attributes:
        unit: What is protected: `record`, `client`, or `none`.
        epsilon: The epsilon that holds for every client over the horizon; None where none holds.
        delta: Probability with which epsilon may fail; None without epsilon.
        noise_multiplier: Standard deviation of the noise, in units of the clipping norm; of record level that of the
            client with the fewest samples, None if no numbers of samples are known.
        clip_norm: The clipping norm.
        accountant: Name of the method that computes epsilon.
        horizon: Number of releases so far (client), or of rounds of the run, with repeated ones (record).
        epsilon_taken: Epsilon of the noisy steps so far, of the client for which it is largest;
            None unless all clients report their steps.
        epsilon_central_limit: The same by the central limit of Gaussian differential privacy, which is no bound.
        crowd: Least number of clients in a sum that had the noise, of honest ones with `sum`; None at record level.
        weights: Number of numbers in an upload, if clients randomise each of them; otherwise None.
        weight_epsilon: Epsilon of one of these numbers in one release; None without them.
        not_covered: What epsilon says nothing about.
        reason: Why no epsilon holds; None if one does.
    """

    unit: str
    epsilon: float | None = None
    delta: float | None = None
    noise_multiplier: float | None = None
    clip_norm: float | None = None
    accountant: str | None = None
    horizon: int | None = None
    crowd: int | None = None
    weights: int | None = None
    weight_epsilon: float | None = None
    epsilon_taken: float | None = None
    epsilon_central_limit: float | None = None
    not_covered: tuple[str, ...] = ()
    reason: str | None = None

    @classmethod
    def of(cls, run: Path, manifest: Mapping[str, Any]) -> "PrivacyStatement":
        """Return the statement about a run so far.

        Args:
            run: The run's folder.
            manifest: Its manifest.

        Raises:
            StateError: If the record of its releases is damaged.
            RunDirectoryError: If its method is of the user's own and cannot be imported.
        """
        settings = default_settings() | trained_settings(manifest)
        if is_user_code(str(settings["method"])):
            method_of(run)
        if randomises_weights(str(settings["method"])):
            return _of_weights(run)
        if settings["privacy.unit"] == "client":
            return _of_clients(run, settings)
        return _of_records(run, manifest, settings) if settings["dp.epsilon"] else _of_none(settings)

    def entry(self) -> dict[str, Any]:
        """Return the entry of summary.json."""
        return asdict(self) | {"not_covered": list(self.not_covered)}


def statement_text(entry: Mapping[str, Any]) -> str:
    """Return the entry `privacy` of a summary in one line; empty for a run without noise and clipping."""
    if entry["unit"] == "none":
        return f"no epsilon: {entry['reason']}" if entry["clip_norm"] else ""
    about = f"of {entry['unit']}s over {entry['horizon']} {'rounds' if entry['unit'] == 'record' else 'releases'}"
    crowd_name = "honest clients" if entry["accountant"] == ACCOUNTANTS["sum"] else "clients"
    crowd = "" if entry["crowd"] in (None, 1) else f", in sums of at least {entry['crowd']} {crowd_name}"
    if entry["epsilon"] is None:
        return f"no epsilon {about}{crowd}: {entry['reason']}"
    stated = f"epsilon {entry['epsilon']:.2f} at delta {entry['delta']:g}"
    if entry.get("epsilon_taken") is not None:
        about += (
            f" ({entry['epsilon_taken']:.2f} for the steps taken; the central limit says "
            f"{entry['epsilon_central_limit']:.2f}, which is no bound)"
        )
    if entry.get("weights"):
        about += (
            f" ({entry['weight_epsilon']:g} for each of {entry['weights']} weights and release; {PROMISES_NOTHING})"
        )
    return f"{stated} {about}{crowd}; not covered: {'; '.join(entry['not_covered'])}"


def _of_none(settings: Mapping[str, Scalar]) -> PrivacyStatement:
    if not settings["privacy.clip-norm"]:
        return PrivacyStatement(unit="none", reason="nothing is clipped, and no noise is added")
    return PrivacyStatement(
        unit="none",
        noise_multiplier=float(settings["privacy.noise-multiplier"]),
        clip_norm=float(settings["privacy.clip-norm"]),
        reason="without privacy.unit=client, clipping and noise are obfuscation, which is not accounted for",
    )


def _of_weights(run: Path) -> PrivacyStatement:
    releases = _counted_releases(run)
    return PrivacyStatement(
        unit="client",
        epsilon=sum(release.weights * release.weight_epsilon for release in releases),
        delta=0.0,
        accountant=WEIGHT_ACCOUNTANT,
        horizon=len(releases),
        crowd=min((release.crowd for release in releases), default=None),
        weights=max((release.weights for release in releases), default=None),
        weight_epsilon=max((release.weight_epsilon for release in releases), default=None),
        not_covered=(*NEVER_COVERED, OWN_MODEL, REPEATED),
    )


def _counted_releases(run: Path) -> list[SumRelease]:
    """Return a run's releases.

    Raises:
        StateError: If there are fewer than rounds in which clients were trained.
    """
    releases = read_releases(run)
    trained = sum(row["kind"] == "train" and row["clients"] > 0 for row in read_metrics(run))
    if trained > len(releases):
        raise StateError(
            f"{run / FILE} has {len(releases)} releases, but clients were trained in {trained} rounds, so that the "
            f"run's epsilon is unknown; restore the file from a copy"
        )
    return releases


def _of_clients(run: Path, settings: Mapping[str, Scalar]) -> PrivacyStatement:
    releases = _counted_releases(run)
    multiplier, noise = float(settings["privacy.noise-multiplier"]), cast("Noise", settings["privacy.noise"])
    delta = float(settings["privacy.delta"])
    epsilon = client_epsilon(multiplier, len(releases), delta, noise) if multiplier else math.inf
    reason = None
    if not math.isfinite(epsilon):
        reason = "no noise is added" if not multiplier else "the noise is too small for any useful epsilon"
    return PrivacyStatement(
        unit="client",
        epsilon=None if reason else epsilon,
        delta=delta,
        noise_multiplier=multiplier,
        clip_norm=float(settings["privacy.clip-norm"]),
        accountant=ACCOUNTANTS[noise],
        horizon=len(releases),
        crowd=min((release.crowd for release in releases), default=None),
        not_covered=(*NEVER_COVERED, OWN_MODEL, *TRUSTED[noise], *((REPEATED,) if noise == "local" else ())),
        reason=reason,
    )


def _of_records(run: Path, manifest: Mapping[str, Any], settings: Mapping[str, Scalar]) -> PrivacyStatement:
    plan = _Plan.of(settings)
    rounds = plan.rounds + sum(entry.get("repeated_rounds", 0) for entry in manifest.get("resumed", []))
    reported, examples = _reported_steps(run)
    sizes = known_sizes(manifest, examples)
    # A client that has not reported in the last round may have taken part in all rounds, and in repeated ones.
    steps = {client: reported.get(client, rounds * plan.steps_of(size)) for client, size in sizes.items()}
    reason, epsilon = None, plan.epsilon  # every client computes its noise for this epsilon
    for size, taken in {(size, steps[client]) for client, size in sizes.items()}:
        epsilon = max(epsilon, plan.spent(size, taken))
    if not math.isfinite(epsilon):
        planned = {client: plan.rounds * plan.steps_of(size) for client, size in sizes.items()}
        most = max(planned, key=lambda client: steps[client] / planned[client])
        reason = (
            f"client {most} has {steps[most]:,} noisy steps, its node says, where {planned[most]:,} were planned, so "
            f"that no useful epsilon is left; steps of repeated rounds count"
        )
    elif not sizes and rounds > plan.rounds:
        reason = (
            f"{rounds - plan.rounds} rounds were repeated with other noise, and the clients' numbers of samples are "
            f"not known here; the nodes' records have what was spent (hyperfl dp --spent)"
        )
    if settings["dp.heads"] == "published" and has_private_classifier(str(settings["method"])):
        reason = OF_PUBLISHED_HEADS
    is_counted = bool(reported) and reported.keys() == sizes.keys()
    taken, limit = plan.of_taken(sizes, steps) if is_counted and not reason else (None, None)
    return PrivacyStatement(
        unit="record",
        epsilon=None if reason else epsilon,
        delta=plan.delta,
        noise_multiplier=plan.noise(min(sizes.values())) if sizes else None,
        clip_norm=float(settings["dp.clip-norm"]),
        accountant=RECORD_ACCOUNTANT,
        horizon=rounds,
        epsilon_taken=taken,
        epsilon_central_limit=limit,
        not_covered=(*NEVER_COVERED, *(() if is_counted else (REPEATED,))),
        reason=reason,
    )


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What a run with noisy steps was planned for; `epsilon` and `delta` are those of each client."""

    epsilon: float
    delta: float
    rounds: int
    epochs: int
    batch: int

    @classmethod
    def of(cls, settings: Mapping[str, Scalar]) -> "_Plan":
        return cls(
            epsilon=float(settings["dp.epsilon"]),
            delta=float(settings["dp.delta"]),
            rounds=int(settings["num-rounds"]),
            epochs=int(settings["local-epochs"]),
            batch=int(settings["batch-size"]),
        )

    def steps_of(self, size: int) -> int:
        """Return the number of steps in a round of a client with some number of samples."""
        return self.epochs * -(-size // self.batch)

    def noise(self, size: int) -> float:
        """Return the noise multiplier of such a client."""
        return record_noise(self.epsilon, self.delta, min(1.0, self.batch / size), self.rounds * self.steps_of(size))

    def spent(self, size: int, steps: int) -> float:
        """Return the epsilon of such a client's steps, at least the planned one."""
        if steps <= self.rounds * self.steps_of(size):
            return self.epsilon
        return max(self.epsilon, record_epsilon(self.noise(size), min(1.0, self.batch / size), steps, self.delta))

    def of_taken(self, sizes: Mapping[int, int], steps: Mapping[int, int]) -> tuple[float, float]:
        """Return the largest epsilon of the steps that a client has taken, in both ways.

        Of two clients with the same share of their planned steps, the one with more samples has spent more: one is
        left out if another has at least its share and its number of samples.
        """
        ordered = sorted(((steps[client] / self.steps_of(size), size, steps[client]) for client, size in sizes.items()))
        found, largest = [], 0
        for _, size, taken in reversed(ordered):
            if size > largest:
                largest = size
                arguments = (self.noise(size), min(1.0, self.batch / size), taken, self.delta)
                found.append((record_epsilon(*arguments), central_limit_epsilon(*arguments)))
        exact, limits = zip(*found, strict=True)
        return max(exact), max(limits)


def _reported_steps(run: Path) -> tuple[dict[int, int], dict[int, int]]:
    """Return the noisy steps that clients have reported in the last round, and all known numbers of samples."""
    reported: dict[int, int] = {}
    sizes: dict[int, int] = {}
    for record in read_metrics(run):
        if record["kind"] == "train":
            reported = {}
        elif record["kind"] == "client":
            sizes[record["client"]] = record["num_examples"]
            if math.isfinite(steps := record.get("private_steps", math.inf)):
                reported[record["client"]] = int(steps)
    return reported, sizes
