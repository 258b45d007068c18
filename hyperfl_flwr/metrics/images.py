"""Measure the similarity of image pairs: PSNR, SSIM and LPIPS, one value per pair.

PSNR and SSIM come from torchmetrics, LPIPS (Zhang et al., CVPR 2018) from its authors' package `lpips`. Pixels are in
[0, 1]. Tables contain means of these values; the mean of PSNRs differs from the PSNR of the mean error.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hyperfl_flwr.core.errors import DataError

Images = NDArray[np.float32]
Values = NDArray[np.float64]

GAUSSIAN_SIDE = 11
"""Side of SSIM's Gaussian window (sigma 1.5, Wang et al. 2004); smaller images get a uniform window of 7."""

SMALL_SIDE = 7
"""Side of that uniform window; for smaller images SSIM is NaN."""

LPIPS_SIDE = 64
"""Side to which smaller images are enlarged bilinearly for LPIPS: AlexNet's first layers would reduce 28 pixels to
nothing. Grey images are repeated to three channels. Values are comparable only for the same side."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Similarity:
    """Similarity values, one per pair of images [n].

    Attributes:
        psnr: PSNR in dB, data range 1; infinite for equal images, never capped.
        ssim: SSIM in [-1, 1]; NaN for images with a side below 7 pixels.
        lpips: LPIPS, 0 for equal images, larger for less similar ones; None without weights.
    """

    psnr: Values
    ssim: Values
    lpips: Values | None = None


def similarity(images: Images, references: Images, lpips: "Lpips | None" = None) -> Similarity:
    """Compare images with references, pair by pair.

    Args:
        images: Images [n, C, H, W] in [0, 1].
        references: Reference images of the same shape.
        lpips: The LPIPS network; None to omit LPIPS.

    Raises:
        ValueError: If the shapes differ.
    """
    if images.shape != references.shape or images.ndim != 4:
        raise ValueError(
            f"images and references must both be [n, C, H, W] of the same shape, got {images.shape} and "
            f"{references.shape}"
        )
    return Similarity(
        psnr=psnr(images, references),
        ssim=ssim(images, references),
        lpips=None if lpips is None else lpips(images, references),
    )


def psnr(images: Images, references: Images) -> Values:
    """Return the peak signal-to-noise ratios in dB, [n]."""
    from torchmetrics.functional.image import peak_signal_noise_ratio

    return _per_pair(
        lambda one, other: peak_signal_noise_ratio(one, other, data_range=1.0, reduction="none", dim=(1, 2, 3)),
        images,
        references,
    )


def ssim(images: Images, references: Images) -> Values:
    """Return the structural similarities (Wang et al. 2004), [n]: means over all pixels, with reflected borders.

    The window is Gaussian with 11 pixels, or uniform with 7 pixels if a side is below 11; NaN if a side is below 7.
    """
    from torchmetrics.functional.image import structural_similarity_index_measure

    side = min(images.shape[2:])
    if side < SMALL_SIDE:
        return np.full(len(images), np.nan)

    def measure(one: Tensor, other: Tensor) -> Tensor:
        value = structural_similarity_index_measure(
            one, other, gaussian_kernel=side >= GAUSSIAN_SIDE, kernel_size=SMALL_SIDE, data_range=1.0, reduction="none"
        )
        assert isinstance(value, Tensor)
        return value

    return _per_pair(measure, images, references)


class Lpips:
    """Learned perceptual distance (LPIPS) on AlexNet's convolutions; downloads nothing.

    Args:
        weights: File with AlexNet's convolutions, pretrained on ImageNet: a torch state dict with torchvision's names
            (`features.0.weight`, ...). The linear layers are part of the package `lpips`.
        device: Device to compute on; None for the CPU.

    Raises:
        DataError: If the file is missing or does not contain these weights.
    """

    def __init__(self, weights: Path, device: torch.device | None = None) -> None:
        import lpips

        self._device = device or torch.device("cpu")
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            # The package calls torchvision's constructor with deprecated arguments, which warns, and initialises random
            # weights, which are replaced below and must not advance the global generator.
            warnings.simplefilter("ignore")
            network = lpips.LPIPS(net="alex", pnet_rand=True, verbose=False)
        _load_backbone(network.net, weights)
        self._network: nn.Module = network.to(self._device).eval()

    @torch.no_grad()
    def __call__(self, images: Images, references: Images) -> Values:
        """Return the distances [n] of images [n, C, H, W] in [0, 1] from references of the same shape."""
        return _per_pair(self._measure, images, references)

    def _measure(self, one: Tensor, other: Tensor) -> Tensor:
        distances: Tensor = self._network(self._prepared(one), self._prepared(other))
        return distances.flatten()

    def _prepared(self, images: Tensor) -> Tensor:
        height, width = (max(side, LPIPS_SIDE) for side in images.shape[2:])
        images = images.to(self._device).expand(-1, 3, -1, -1) * 2 - 1  # the network expects [-1, 1]
        return nn.functional.interpolate(images, (height, width), mode="bilinear", align_corners=False)


def _load_backbone(network: nn.Module, weights: Path) -> None:
    """Load a file's parameters `features.LAYER.weight` into a backbone's `sliceN.LAYER.weight`."""
    try:
        values = torch.load(weights, map_location="cpu", weights_only=True)
        sources = {name: f"features.{name.partition('.')[2]}" for name in network.state_dict()}
        network.load_state_dict({name: values[source] for name, source in sources.items()})
    except FileNotFoundError:
        raise DataError(f"{weights} is missing; LPIPS needs AlexNet's weights: give their file or omit it") from None
    except Exception as error:  # torch's message would advise the user to load the file without `weights_only`
        raise DataError(
            f"{weights} must contain AlexNet's convolutions under torchvision's names, but reading it failed "
            f"({type(error).__name__}); download torchvision's weights of alexnet again"
        ) from error


def _per_pair(measure: Callable[[Tensor, Tensor], Tensor], images: Images, references: Images) -> Values:
    if not len(images):
        return np.zeros(0)
    pair = (torch.from_numpy(np.ascontiguousarray(side, dtype=np.float32)) for side in (images, references))
    values: Values = measure(*pair).reshape(len(images)).double().cpu().numpy()
    return values
