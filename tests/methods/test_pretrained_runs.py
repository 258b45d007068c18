"""All methods train adapters in a pre-trained body as they train other networks."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from federations import Federate, last_checkpoint
from safetensors.torch import save_file

from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.methods import METHODS
from hyperfl_flwr.models.provenance import use_weights

TARGET = "lpm:timm/test_resnet@32"

NOISY = ("srr-fl", "prifedsync", "fedakd")
"""Methods whose clients draw noise from the operating system."""


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("weights") / "body.safetensors"
    save_file(timm.create_model("test_resnet").state_dict(), path)
    return path


@pytest.fixture(autouse=True)
def downloads_again() -> Iterator[None]:
    yield
    use_weights("auto")


def settings(weights: Path, **changes: Any) -> dict[str, Any]:
    return {"target": TARGET, "lpm.weights": str(weights), **changes}


@pytest.mark.parametrize("method", METHODS)
def test_every_method(method: str, federate: Federate, weights: Path) -> None:
    """It trains them, alone and together with equal results up to rounding; FedBN needs normalisation to train."""
    if method == "fedbn":
        with pytest.raises(ConfigError, match="no normalisation"):
            federate(method, **settings(weights))
        return
    together, _ = last_checkpoint(federate(method, **settings(weights)))
    alone, _ = last_checkpoint(federate(method, **settings(weights, cohort="one-by-one")))
    assert together.keys() == alone.keys()
    assert not any("layer1" in key for key in together)
    if method not in NOISY:
        for key, values in together.items():
            np.testing.assert_allclose(values, alone[key], rtol=1e-3, atol=1e-4, err_msg=key)
