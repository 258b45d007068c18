"""The settings `precision` and `deterministic`: torch's switches, what is rounded, and what is refused."""

import json
import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from federations import of_every_method, small_settings
from torch import nn

from hyperfl_flwr.app.methods import check_run
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.contract.base import Federate
from hyperfl_flwr.contract.folders import exact, last_checkpoint, metrics, outcome
from hyperfl_flwr.core.arithmetic import CUBLAS_WORKSPACE, set_arithmetic
from hyperfl_flwr.core.errors import ConfigError, DeviceError
from hyperfl_flwr.models.initialisation import initial_state
from hyperfl_flwr.models.lowered import in_bfloat16
from hyperfl_flwr.models.target import Target
from hyperfl_flwr.models.targets import build_target

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def torchs_own_switches(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start from torch's defaults, and leave the switches of a run in full precision."""
    monkeypatch.delenv(CUBLAS_WORKSPACE, raising=False)
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = True, False
    yield
    set_arithmetic("fp32", deterministic=False, device=CPU)


@pytest.mark.parametrize(("precision", "allowed"), [("fp32", False), ("tf32", True), ("bf16", False)])
def test_a_run_decides_on_tf32_whatever_torchs_default(precision: str, allowed: bool, federate: Federate) -> None:
    seen: list[tuple[bool, bool]] = []
    with pytest.MonkeyPatch.context() as patch:

        def watched(*arguments: object) -> Target:
            seen.append((torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32))
            return build_target(*arguments)

        patch.setattr("clients.engine.client_model.build_target", watched)
        federate("fedavg", 1, num_rounds=1, num_clients=1, precision=precision)
    assert set(seen) == {(allowed, allowed)}


@pytest.mark.parametrize("deterministic", [False, True])
def test_deterministic_algorithms_are_switched_on_and_off(deterministic: bool) -> None:
    torch.set_deterministic_debug_mode("default" if deterministic else "error")
    set_arithmetic("fp32", deterministic=deterministic, device=CPU)
    assert torch.are_deterministic_algorithms_enabled() is deterministic
    assert os.environ.get(CUBLAS_WORKSPACE) == (":4096:8" if deterministic else None)


def test_the_users_workspace_of_cublas_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CUBLAS_WORKSPACE, ":16:8")
    set_arithmetic("fp32", deterministic=True, device=CPU)
    assert os.environ[CUBLAS_WORKSPACE] == ":16:8"


def test_a_gpu_without_bfloat16_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    with pytest.raises(
        DeviceError, match=r"bf16, but Tesla T4 has compute capability 7.5, below 8.0; use precision=fp"
    ):
        set_arithmetic("bf16", deterministic=False, device=torch.device("cuda"))
    set_arithmetic("tf32", deterministic=False, device=torch.device("cuda"))


def test_the_layers_compute_in_bfloat16_and_the_rest_in_float32() -> None:
    """The logits have the 8 significant bits of bfloat16; outputs, parameters and gradients are float32."""
    generator = torch.Generator().manual_seed(0)
    plain, lowered = (build_target("cnn", (1, 28, 28), 10) for _ in range(2))
    values, images = initial_state(plain, generator), torch.randn(20, 1, 28, 28, generator=generator)
    for target in (plain, lowered):
        target.load_state_dict({name: value.clone() for name, value in values.items()}, assign=True)
        target.requires_grad_(True)
    in_bfloat16(lowered)
    types: set[torch.dtype] = set()
    for layer in lowered.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            layer.register_forward_hook(lambda _layer, _inputs, output: types.add(output.dtype))
    expected, found = plain(images), lowered(images)
    found.sum().backward()
    # The classifier's own output is float32: the hook sees it after the conversion.
    assert types == {torch.bfloat16, torch.float32}
    assert found.dtype == torch.float32
    assert {(p.dtype, p.grad.dtype) for p in lowered.parameters() if p.grad is not None} == {(torch.float32,) * 2}
    difference = (found - expected).abs().max() / expected.abs().max()
    assert 2**-14 < difference < 2**-5
    assert list(lowered.state_dict()) == list(values)


@of_every_method
def test_a_method_trains_in_bfloat16(method: str, federate: Federate) -> None:
    """The losses of the first round are near those in float32, but not equal; what is sent is of the same types."""
    runs = [federate(method, 1, num_clients=2, num_rounds=2, precision=name) for name in ("fp32", "bf16")]
    full, rounded = ([row["train_loss"] for row in metrics(run) if "train_loss" in row][:3] for run in runs)
    assert rounded == pytest.approx(full, rel=0.03)
    assert rounded != full
    layouts = [{key: value[:2] for key, value in exact(last_checkpoint(run)[0]).items()} for run in runs]
    assert layouts[0] == layouts[1]


@pytest.mark.parametrize("method", ["fedavg", "hyperfl"])
def test_deterministic_changes_nothing_on_a_cpu_and_is_in_the_manifest(method: str, federate: Federate) -> None:
    plain, deterministic = (federate(method, 1, num_clients=2, deterministic=each) for each in (False, True))
    assert outcome(plain) == outcome(deterministic)
    settings = json.loads((deterministic / "manifest.json").read_text())["settings"]
    assert (settings["precision"], settings["deterministic"]) == ("fp32", True)


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_noisy_steps_need_full_precision(precision: str) -> None:
    settings = small_settings(method="fedavg", precision=precision) | {"dp.epsilon": 4.0}
    expected = f"dp.epsilon must be 0 with precision = {precision}, got 4: .* bound of clipping; take precision = fp32"
    with pytest.raises(ConfigError, match=expected):
        check_run(RunConfig.from_flat(settings), (1, 8, 8), 10)
    check_run(RunConfig.from_flat(settings | {"precision": "fp32"}), (1, 8, 8), 10)


def test_an_upload_with_noise_is_clipped_after_training_in_bfloat16(federate: Federate) -> None:
    """`privacy.*` clips and noises what is sent, which is float32: the bound holds whatever the precision."""
    bounds: dict[str, object] = {"privacy.clip-norm": 0.01, "privacy.noise-multiplier": 0.0, "privacy.unit": "none"}
    run = federate("fedavg", 1, num_clients=2, num_rounds=1, precision="bf16", **bounds)
    trained, _ = last_checkpoint(run)
    start = federate("fedavg", 1, num_clients=2, num_rounds=1, precision="fp32", learning_rate=1e-30, weight_decay=0.0)
    before, _ = last_checkpoint(start)
    change = np.sqrt(sum(float(np.square(trained[key] - before[key]).sum()) for key in before))
    assert 0.001 < change <= 0.01 * (1 + 1e-6)
