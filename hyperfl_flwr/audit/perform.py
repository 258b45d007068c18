"""Perform an audit as a user asks for it: of a new round, of one that continues a run, or of recorded uploads."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hyperfl_flwr.attacks.optimiser_loop import Progress
from hyperfl_flwr.audit.audit import AttackResult, audit
from hyperfl_flwr.audit.chosen import chosen_attacks
from hyperfl_flwr.audit.make_round import local_epochs_setting, make_attacked_round
from hyperfl_flwr.audit.observation_files import ObservationFiles
from hyperfl_flwr.audit.options import Options
from hyperfl_flwr.audit.record_round import AttackedRound, recorded_round
from hyperfl_flwr.audit.replaced import ignored_text
from hyperfl_flwr.audit.report import write_audit
from hyperfl_flwr.config.table import with_defaults
from hyperfl_flwr.core.device import resolve_device
from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.core.tasks import CLASSIFICATION
from hyperfl_flwr.data.sample_format import from_here
from hyperfl_flwr.metrics.images import Lpips
from hyperfl_flwr.models.provenance import find_sources
from hyperfl_flwr.runs.run_data import require_classes, require_dataset
from hyperfl_flwr.runs.run_directory import refuse_used_directory, settings_of
from hyperfl_flwr.runs.run_sources import find_sources_of

NUM_IMAGES, BATCH_SIZE, LOCAL_EPOCHS = 20, 1, 1
"""Defaults of an audit: one image of each of twenty clients, from one local step."""


@dataclass(frozen=True, kw_only=True)
class AuditRequest:
    """What a user asks an audit for; None, and empty texts and mappings, are what the user has not given.

    Attributes:
        named: Method and data set, by the keys of their settings.
        changes: Other settings of the attacked round; they override `named`, `batch_size` and `local_epochs`.
        attacks: Names of the attacks; empty for all that apply.
        num_images: Total number of private images.
        batch_size: Images per local step.
        samples: Images per client; None for one batch.
        local_epochs: Local epochs of each client.
        iterations: Iterations of each optimisation; None for the attack's own number.
        restarts: Random starts of each optimisation; None for the attack's own number.
        total_variation: Weight of the total-variation prior; None for the attack's own.
        prior: Data set from whose images `ig-prior` learns.
        labels_known: Whether the attacks get the true labels.
        summed: Whether only the sum of the clients' uploads is attacked, as with secure sums.
        by_neighbours: Whether the first and last client of a chain attack their neighbours.
        malicious_server: Whether the server forges what it sends.
        checkpoint: Folder of the run whose last checkpoint the attacked round continues.
        recorded: Folder of the run whose recorded uploads are attacked.
    """

    named: Mapping[str, str] = field(default_factory=dict)
    changes: Mapping[str, Scalar] = field(default_factory=dict)
    attacks: Sequence[str] = ()
    num_images: int | None = None
    batch_size: int | None = None
    samples: int | None = None
    local_epochs: int | None = None
    iterations: int | None = None
    restarts: int | None = None
    total_variation: float | None = None
    prior: str = ""
    labels_known: bool = False
    summed: bool = False
    by_neighbours: bool = False
    malicious_server: bool = False
    checkpoint: Path | None = None
    recorded: Path | None = None

    def __post_init__(self) -> None:
        """Raise a ConfigError if a number is out of range."""
        least = {"num-images": 1, "batch-size": 1, "samples": 1, "local-epochs": 1, "iterations": 2, "restarts": 1}
        for name, smallest in least.items():
            value = getattr(self, name.replace("-", "_"))
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < smallest):
                raise ConfigError(f"--{name} must be a whole number of at least {smallest}; got {value!r}")
        weight = self.total_variation
        if weight is not None and not (isinstance(weight, int | float) and math.isfinite(weight) and weight >= 0):
            raise ConfigError(f"--total-variation must be a number of at least 0; got {weight!r}")

    def options(self) -> Options:
        """Return the options of `hyperfl_flwr.audit.audit`."""
        return Options(
            attacks=self.attacks, num_images=NUM_IMAGES if self.num_images is None else self.num_images,
            samples=self.samples,
            labels_known=self.labels_known, iterations=self.iterations, restarts=self.restarts,
            total_variation=self.total_variation, summed=self.summed, by_neighbours=self.by_neighbours,
            malicious_server=self.malicious_server, prior=self.prior,
        )  # fmt: skip

    def local(self) -> dict[str, Scalar]:
        """Return the settings of the clients' local steps."""
        return {
            "batch-size": BATCH_SIZE if self.batch_size is None else self.batch_size,
            "local-epochs": LOCAL_EPOCHS if self.local_epochs is None else self.local_epochs,
        }


def perform(
    request: AuditRequest,
    output: Path,
    lpips_weights: Path | None = None,
    *,
    on_note: Callable[[str], None] = lambda note: None,
    on_finding: Callable[[str, AttackResult], None] = lambda name, finding: None,
    progress: Callable[[str], Progress | None] = lambda name: None,
) -> dict[str, Any]:
    """Attack what a request asks for, and write the result to a folder.

    Args:
        request: The request.
        output: Folder of the result, new or empty.
        lpips_weights: File of AlexNet's ImageNet weights; None to leave LPIPS out.
        on_note: Receives a line about settings that the audit ignores.
        on_finding: As for `hyperfl_flwr.audit.audit.audit`.
        progress: As for `hyperfl_flwr.audit.audit.audit`.

    Returns:
        The content of audit.json, see `hyperfl_flwr.audit.report.measure`; audit.md, audit.png and audit.html are
        written, too.

    Raises:
        ConfigError: If settings or options are wrong, or exclude each other.
        RunDirectoryError: If `output` is in use, or `checkpoint` or `recorded` is no folder of a suitable run.
        HyperFLError: If data or code of the round are missing.
    """
    options = request.options()
    refuse_used_directory(output)
    if request.by_neighbours:
        others = {"--recorded": request.recorded, "--checkpoint": request.checkpoint, "--summed": request.summed}
        _refuse_combination(
            "--by-neighbours", others | {"--prior": request.prior, "--malicious-server": request.malicious_server}
        )
    if request.recorded is not None:
        target, observed = _recorded_target(request, request.recorded)
        options = replace(options, summed=target.summed)  # a run with secure sums has recorded a sum
    else:
        target, observed = _fresh_target(request, options, on_note), None
    chosen_attacks(options.attacks, target)  # fail before loading weights and drawing bars
    lpips = None if lpips_weights is None else Lpips(lpips_weights, resolve_device(target.config.device))
    findings = audit(target, options, observed, on_finding=on_finding, progress=progress)
    output.mkdir(parents=True, exist_ok=True)
    return write_audit(target, findings, output, lpips)


def _recorded_target(request: AuditRequest, run: Path) -> tuple[AttackedRound, ObservationFiles]:
    """Return the round that a run has recorded, and what it has recorded."""
    sizes = {
        "num-images": request.num_images, "batch-size": request.batch_size, "samples": request.samples,
        "local-epochs": request.local_epochs,
    }  # fmt: skip
    settings = {key: value for key, value in request.changes.items() if key != "data-root"}
    others = {"--checkpoint": request.checkpoint, "--set": settings, "--malicious-server": request.malicious_server}
    _refuse_combination("--recorded", {**request.named, **sizes, **others})
    target, observed = recorded_round(run.absolute(), request.changes, summed=request.summed)
    return replace(target, prior=request.prior, labels_known=request.labels_known), observed


def _fresh_target(request: AuditRequest, options: Options, on_note: Callable[[str], None]) -> AttackedRound:
    """Return a round that the audit runs itself, from the initial model or from a run's checkpoint."""
    changes = dict(request.changes)
    if request.checkpoint is not None:
        _refuse_combination("--checkpoint", request.named)
        require_dataset(request.checkpoint)
        require_classes(request.checkpoint)
        settings = settings_of(request.checkpoint)
        find_sources_of(request.checkpoint)
    else:
        given: dict[str, Scalar] = {**request.named, **changes}
        if own := given.get("dataset"):
            changes["dataset"] = from_here(str(own), has_data_root="data-root" in changes)
        find_sources({**given, **changes})
        settings = with_defaults({**given, **changes})
    merged = {**settings, **request.local(), **changes}
    if merged.get("task", CLASSIFICATION.name) != CLASSIFICATION.name:
        raise ConfigError(f"task must be classification, which the attacks are for; got {merged['task']!r}")
    # The derived epochs must not override what was given.
    merged = {**merged, **local_epochs_setting(merged, options), **changes}
    target = make_attacked_round(merged, options, request.checkpoint and request.checkpoint.absolute())
    if text := ignored_text(changes, target.config.flat()):
        on_note(text)
    return target


def _refuse_combination(option: str, others: Mapping[str, object]) -> None:
    if given := [name if name.startswith("-") else f"--{name}" for name, value in others.items() if value]:
        raise ConfigError(
            f"{', '.join(given)} cannot be given with {option}, which determines it; leave one of them out"
        )
