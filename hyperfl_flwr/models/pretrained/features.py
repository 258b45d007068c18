"""Feature vectors of images, computed by a MobileNetV2 that was trained on ImageNet (Sandler et al., CVPR 2018)."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from hyperfl_flwr.models.pretrained.names import Body
from hyperfl_flwr.models.pretrained.weights import body_on, load_body

MOBILENET = Body(library="torchvision", model="mobilenet_v2", side=None)

NUM_FEATURES = 1280
"""Number of features that MobileNetV2 computes: the channels of its last map, averaged over the positions."""

IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Mean and standard deviation per channel with which networks of torchvision are trained on ImageNet."""


@dataclass(frozen=True, eq=False)
class FeatureNetwork:
    """A frozen network that computes features.

    Attributes:
        network: Images [B, 3, H, W] -> features [B, 1280].
        device: Its device.
        sha256: Hash of its weights.
    """

    network: nn.Module
    device: torch.device
    sha256: str

    def __call__(self, images: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        """Return the features [B, 1280], float32, of images [B, 3, H, W] in 0..255."""
        mean, std = (torch.tensor(values, device=self.device)[:, None, None] for values in IMAGENET)
        with torch.inference_mode():
            scaled = torch.from_numpy(images).to(self.device).to(torch.float32) / 255
            # On a CPU, this layout takes less than half of the time.
            scaled = scaled.contiguous(memory_format=torch.channels_last)
            features: Tensor = self.network((scaled - mean) / std)
        return np.asarray(features.cpu().numpy(), dtype=np.float32)


def load_mobilenet(weights: str, device: torch.device) -> FeatureNetwork:
    """Load MobileNetV2 without its classifier.

    Args:
        weights: `auto` for torchvision's download, or the absolute path of a state dict with torchvision's names.
        device: Where it computes.

    Raises:
        ConfigError: If the weights cannot be downloaded or read, or are those of another network.
    """
    body = load_body(MOBILENET, weights, option="--weights")
    return FeatureNetwork(body_on(body, device, torch.float32), device, body.sha256)
