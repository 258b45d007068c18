"""The short runs whose numbers are stored in experiments/expected/golden.json, and what they compute.

The code of earlier commits computes them, too (fill_in.py).
"""

import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from hyperfl_flwr.app import client as client_app
from hyperfl_flwr.app import server as server_app
from hyperfl_flwr.audit.audit import Options, audit
from hyperfl_flwr.audit.make_round import local_epochs_setting, make_attacked_round
from hyperfl_flwr.audit.report import measure
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.config.table import default_settings
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.methods import METHODS
from hyperfl_flwr.runs.run_directory import read_metrics
from hyperfl_flwr.server.in_process_grid import InProcessGrid

Settings = Mapping[str, Scalar]

Numbers = Mapping[str, Sequence[float]]
"""Numbers of a golden run by name, one per round."""

COMMON: Settings = {
    "dataset": "digits",
    "device": "cpu",
    "seed": 0,
    "num-clients": 4,
    "num-rounds": 3,
    "fraction-train": 1.0,
    "local-epochs": 2,
    "batch-size": 50,
    "learning-rate": 0.01,
    "momentum": 0.5,
    "weight-decay": 5e-4,
    "target": "cnn",
    "threads": 1,
    "data.partition": "similarity",
    "data.seed": 0,
    "data.train-samples": 100,
    "data.test-samples": 60,
    "data.iid-fraction": 0.2,
    "hyperfl.initialisation": "hyperfan-bias",
    "hyperfl.embedding": "trained",
    "hyperfl.embedding-dim": 16,
    "hyperfl.hidden-width": 32,
    "hyperfl.classifier-learning-rate": 0.1,
    "hyperfl.embedding-learning-rate": "auto",
    "hyperfl.clip-norm": 50.0,
}

SHORT: Settings = {
    "num-rounds": 2,
    "batch-size": 20,
    "learning-rate": 0.1,
    "data.train-samples": 40,
    "data.test-samples": 30,
    "pfedhn.hidden-width": 8,
    "pfedhn.hidden-layers": 1,
    "it-pfl.fine-tune-rounds": 1,
    "fedgen.generator-width": 8,
    "fedgen.generator-steps": 2,
    "fedgen.generated-samples": 8,
    "fedftg.iterations": 1,
    "fedftg.student-steps": 2,
    "fedftg.batch-size": 6,
    "fedftg.generator-width": 2,
    "feddf.steps": 2,
    "feddf.batch-size": 8,
    "priv-hfl.local-steps": 2,
    "priv-hfl.distill": True,
    "priv-hfl.generator-width": 2,
    "priv-hfl.pseudo-samples": 8,
    "fedakd.samples": 30,
    "fedprox.mu": 1.0,
    "moon.mu": 5.0,
}
"""Settings of the other runs: what a method adds to FedAvg must change the numbers by more than their tolerance."""

ATTACKED: Settings = {"data.train-samples": 40, "data.test-samples": 20, "hyperfl.hidden-width": 16}

NOT_ZERO = {"not": 0.0}
"""Condition on a setting of the cells that a run stands for: any other number than 0."""


@dataclass(frozen=True, kw_only=True)
class GoldenRun:
    """A short run.

    Attributes:
        where: Settings of the cells of studies that it stands for; a value `{"not": X}` stands for all others than X.
        changes: Settings that differ from `COMMON`.
        attack: The attack on a round, instead of training; empty for none.
        options: Options of the attack.
        num_nodes: Number of nodes.
    """

    where: Mapping[str, Any]
    changes: Settings
    attack: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    num_nodes: int = 2


LONG: Mapping[str, GoldenRun] = {
    "local": GoldenRun(where={"method": "local"}, changes={"method": "local"}),
    "fedavg": GoldenRun(where={"method": "fedavg"}, changes={"method": "fedavg"}),
    "hyperfl": GoldenRun(where={"method": "hyperfl"}, changes={"method": "hyperfl"}),
    "hyperfl, sampled, a common frozen embedding": GoldenRun(
        where={"method": "hyperfl", "hyperfl.embedding": "common-frozen"},
        changes={"method": "hyperfl", "hyperfl.embedding": "common-frozen", "fraction-train": 0.5},
    ),
}
"""Runs that are compared on CUDA, too."""


def _short(where: Mapping[str, Any], **options: int) -> GoldenRun:
    """Return a short run of FedAvg, or of the method that `where` names, with the settings of `where`."""
    settings = {key: value for key, value in where.items() if value != NOT_ZERO}
    return GoldenRun(where=where, changes={**SHORT, "method": "fedavg", **settings}, **options)


def _with(golden: GoldenRun, **changes: Scalar) -> GoldenRun:
    return GoldenRun(**{**vars(golden), "changes": {**golden.changes, **changes}})


def _attacked(name: str, method: str, **options: Any) -> GoldenRun:
    chosen = {"num_images": 2, "iterations": 4, **options}
    embedding = {"hyperfl.embedding": "per-client"} if options.get("summed") else {}
    changes = {**ATTACKED, "method": method, **embedding}
    return GoldenRun(where={"attack.name": name}, changes=changes, attack=name, options=chosen)


SLOW: Settings = {"learning-rate": 0.01}

OF_METHOD: Mapping[str, Settings] = {
    "fedbn": {"target": "own_networks:with_batchnorm"},
    "pfedhn": SLOW,
    "pfedhn-pc": SLOW,
    "it-pfl": SLOW,
}
"""Settings that a method needs: networks with normalisation, or a rate with which it does not diverge."""

PARTITIONS = ("iid", "dirichlet", "dirichlet-per-label", "shards")

RUNS: Mapping[str, GoldenRun] = {
    **LONG,
    **{
        method: _with(_short({"method": method}), **OF_METHOD.get(method, {}))
        for method in METHODS
        if method not in LONG
    },
    **{f"partition {name}": _short({"data.partition": name}) for name in PARTITIONS},
    **{
        f"{method} with noisy steps": _with(
            _short({"method": method, "dp.epsilon": NOT_ZERO}), **{"dp.epsilon": 8.0, "dp.delta": 1e-3}
        )
        for method in ("fedavg", "fedrep", "ppsgd")
    },
    "privacy of whole clients": _with(
        _short({"privacy.unit": "client"}, num_nodes=4),
        **{"secagg.enabled": True, "privacy.noise-multiplier": 0.01, "privacy.clip-norm": 1.0},
    ),
    "ig": _attacked("ig", "fedavg", labels_known=True),
    "head-gradient": _attacked("head-gradient", "hyperfl", labels_known=True),
    "ig-paper": _attacked("ig-paper", "hyperfl", labels_known=True),
    "rog": _attacked("rog", "fedavg", labels_known=True),
    "rog-paper": _attacked("rog-paper", "hyperfl", labels_known=True),
    "tailored": _attacked("tailored", "hyperfl", labels_known=True),
    "dlg": _attacked("dlg", "fedavg", labels_known=True),
    "channels-known": _attacked("channels-known", "hyperfl", num_images=3, summed=True),
    "channels-ica": _attacked("channels-ica", "hyperfl", num_images=3, summed=True),
    **{name: _attacked(name, "fedavg", num_images=8, malicious_server=True) for name in ("imprint", "trap-weights")},
    **{
        name: _attacked(name, "fedavg", num_images=16, iterations=40, malicious_server=True)
        for name in ("fishing", "feature-fishing")
    },
}
"""All golden runs by name."""

KEYS = {"train": ("train_loss", "personalized_loss", "personalized_accuracy"), "aggregate": ("aggregate_loss",)}
"""Numbers that are compared, by the kind of lines in metrics.jsonl."""


@contextmanager
def repeatable_entropy() -> Iterator[None]:
    """Take the noise of differential privacy, which comes from the operating system, from a seed."""
    with patch("os.urandom", random.Random(0).randbytes):
        yield


def numbers_of(
    name: str, folder: Path, *, num_nodes: int | None = None, device: str = "cpu", defaults: Settings | None = None
) -> Numbers:
    """Run one of `RUNS` in this process, and return its numbers.

    Args:
        name: Name of the run.
        folder: An empty folder.
        num_nodes: Number of nodes; None for the run's.
        device: Device of the training.
        defaults: Defaults of all settings, as stored: a new default must not change what is compared.
    """
    golden, known = RUNS[name], default_settings()
    settings = {**known, **(defaults or {}), **COMMON, **golden.changes, "device": device}
    # Code of an earlier commit lacks some settings.
    config = RunConfig.from_flat(
        {key: value for key, value in settings.items() if key in known} | _output(golden, folder)
    )
    if golden.attack:
        return _attack_numbers(config, golden)
    with repeatable_entropy():
        grid = InProcessGrid(client_app.app, num_nodes or golden.num_nodes, config.flat(), {"simulated": True})
        lines = list(read_metrics(server_app.run(grid, config, plots=False)))
    return {
        key: [line[key] for line in lines if line["kind"] == kind and key in line]
        for kind, keys in KEYS.items()
        for key in keys
    }


def _output(golden: GoldenRun, folder: Path) -> dict[str, Scalar]:
    return {} if golden.attack else {"output": str(folder / "run")}


def _attack_numbers(config: RunConfig, golden: GoldenRun) -> Numbers:
    options = Options(attacks=[golden.attack], **golden.options)
    base = config.flat() | {"batch-size": 1, "local-epochs": 1}
    target = make_attacked_round(base | local_epochs_setting(base, options), options, None)
    found = measure(target, audit(target, options), None)["attacks"][golden.attack]
    return {"psnr": [found["psnr"]["mean"]], "ssim": [found["ssim"]["mean"]]}


def agree(found: Numbers, stored: Numbers) -> bool:
    """Return whether numbers agree as far as processors and versions of torch allow.

    Losses agree to 1e-3. Accuracies are means over 120 test images, of which one may change its class. Decibels agree
    to 0.05 and structural similarities to 0.005.
    """

    def near(key: str, one: float, other: float) -> bool:
        margin = {"psnr": 0.05, "ssim": 0.005}.get(key, 1e-3 * abs(other))
        return abs(one - other) <= (1.01 / 120 if key.endswith("accuracy") else margin)

    return found.keys() == stored.keys() and all(
        len(found[key]) == len(stored[key]) and all(map(near, [key] * len(stored[key]), found[key], stored[key]))
        for key in stored
    )


def computed(name: str, defaults: Settings | None = None) -> Numbers:
    """Return the numbers of a run with the code of this process, in nine digits."""
    with tempfile.TemporaryDirectory() as folder:
        found = numbers_of(name, Path(folder), defaults=defaults)
    return {key: [float(f"{value:.9g}") for value in values] for key, values in found.items()}
