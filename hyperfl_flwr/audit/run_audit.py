"""Audit from Python what a client sends: the command `hyperfl audit` as a function."""

import json
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from hyperfl_flwr.core.errors import ConfigError, RunDirectoryError, StateError
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.launch.given_settings import absolute, changed_settings, plain_scalar


class Audit:
    """The result of an audit; each access reads its file again.

    Args:
        folder: The audit's folder.

    Attributes:
        folder: The audit's folder, as an absolute path, with audit.json, audit.md, audit.png and audit.html.

    Raises:
        RunDirectoryError: If the folder is not an audit's.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = absolute(folder)
        if not (self.folder / "audit.json").is_file():
            raise RunDirectoryError(f"{self.folder} holds no audit.json, so it is not the folder of an audit")

    def __repr__(self) -> str:
        return f"Audit({str(self.folder)!r})"

    @property
    def numbers(self) -> dict[str, Any]:
        """Content of audit.json: for each attack in `attacks` its scores, those of its controls, and a verdict.

        docs/privacy/audit.md defines each number.

        Raises:
            StateError: If it is damaged.
        """
        file = self.folder / "audit.json"
        try:
            found: dict[str, Any] = json.loads(file.read_text())
        except ValueError as error:
            raise StateError(f"{file} is damaged ({error}); repeat the audit") from None
        return found

    @property
    def verdicts(self) -> dict[str, str]:
        """What each attack has found, in a sentence by the attack's name."""
        from hyperfl_flwr.audit.sentences import verdicts

        return verdicts(self.numbers)

    @property
    def report(self) -> Path:
        """Path of the page with verdicts, pictures and controls."""
        return self.folder / "audit.html"


def run_audit(
    *,
    method: str | None = None,
    dataset: str | None = None,
    data_root: Path | str | None = None,
    settings: Mapping[str, Scalar] | None = None,
    attacks: Sequence[str] = (),
    num_images: int | None = None,
    batch_size: int | None = None,
    samples: int | None = None,
    local_epochs: int | None = None,
    iterations: int | None = None,
    restarts: int | None = None,
    total_variation: float | None = None,
    prior: str = "",
    labels_known: bool = False,
    summed: bool = False,
    by_neighbours: bool = False,
    malicious_server: bool = False,
    checkpoint: PathLike[str] | str | None = None,
    recorded: PathLike[str] | str | None = None,
    lpips_weights: Path | str | None = None,
    output: Path | str | None = None,
    progress: bool = True,
) -> Audit:
    """Attack what clients send, and compare the result with their images, as `hyperfl audit` does.

    The round is trained and attacked in this process. Arguments that are None have the command's defaults.

    Args:
        method: Name of the method.
        dataset: Name of the data set, `npz:FILE`, `csv:FILE` or `folder:PATH`.
        data_root: Folder of the data sets; by default the user's cache folder.
        settings: Other settings of the attacked round by their keys.
        attacks: Names of the attacks; empty for all that apply to the method.
        num_images: Total number of private images.
        batch_size: Images per local step.
        samples: Images per client; by default one batch.
        local_epochs: Local epochs of each client.
        iterations: Iterations of each optimisation; by default the attack's own number.
        restarts: Random starts of each optimisation; by default the attack's own number.
        total_variation: Weight of the total-variation prior; by default the attack's own.
        prior: Data set from whose images `ig-prior` learns, other than the attacked one.
        labels_known: Whether the attacks get the true labels.
        summed: Whether only the sum of the clients' uploads is attacked, as with secure sums.
        by_neighbours: Whether the first and last client of priv-hfl's chain attack their neighbours.
        malicious_server: Whether the server forges the weights that it sends.
        checkpoint: The run, or its folder, whose last checkpoint the attacked round continues.
        recorded: The run, or its folder, whose recorded uploads are attacked (`audit.clients`, `audit.rounds`).
        lpips_weights: File of AlexNet's ImageNet weights; without it, LPIPS is not computed.
        output: Folder of the result; by default a new one, `runs/audit` or `runs/audit-N`.
        progress: Whether to show a bar for each attack on standard error.

    Returns:
        The finished audit.

    Raises:
        ConfigError: If settings or options are wrong, or exclude each other; options have the command's names.
        RunDirectoryError: If `output` is in use, or `checkpoint` or `recorded` is no folder of a suitable run.
        HyperFLError: If data or code of the round are missing.
    """
    from hyperfl_flwr.audit.bars import shown_bars
    from hyperfl_flwr.audit.perform import AuditRequest, perform
    from hyperfl_flwr.runs.result_directory import result_directory

    numbers = {
        "num_images": num_images, "batch_size": batch_size, "samples": samples, "local_epochs": local_epochs,
        "iterations": iterations, "restarts": restarts, "total_variation": total_variation,
    }  # fmt: skip
    given: dict[str, Any] = {name: plain_scalar(value) for name, value in numbers.items()}
    if isinstance(attacks, str):
        raise ConfigError(f'attacks must be a list of names, such as ["{attacks}"]; got a text')
    named = {key: value for key, value in {"method": method, "dataset": dataset}.items() if value is not None}
    request = AuditRequest(
        named=named, changes=changed_settings(settings, data_root=data_root), attacks=list(attacks),
        **given, prior=prior, labels_known=labels_known, summed=summed, by_neighbours=by_neighbours,
        malicious_server=malicious_server,
        checkpoint=None if checkpoint is None else absolute(checkpoint),
        recorded=None if recorded is None else absolute(recorded),
    )  # fmt: skip
    chosen = None if output is None else absolute(output)
    weights = None if lpips_weights is None else absolute(lpips_weights)
    with result_directory(chosen, Path("runs/audit")) as folder, shown_bars(quiet=not progress) as bars:
        perform(request, folder, weights, on_note=bars.note, on_finding=bars.done, progress=bars.progress)
    return Audit(folder)
