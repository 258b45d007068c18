"""Train the attacker's prior on public images, once for each set of images, and refuse those that hold private ones."""

import hashlib
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from hyperfl_flwr.attacks.image_space import ImageSpace
from hyperfl_flwr.attacks.learned_prior import PriorTraining, learned_space, train_decoder
from hyperfl_flwr.attacks.optimiser_loop import Progress
from hyperfl_flwr.audit.record_round import AttackedRound
from hyperfl_flwr.core.errors import ConfigError, DataError, StateError
from hyperfl_flwr.core.files.storage import read_arrays, write_arrays
from hyperfl_flwr.core.rng import numpy_generator
from hyperfl_flwr.data.cache import cache_directory
from hyperfl_flwr.data.registry import load_dataset

MOST_IMAGES = 10_000
"""Most images to train on, chosen at random."""

OF_ONE_SOURCE = (frozenset({"mnist", "emnist"}), frozenset({"cifar10", "cinic10"}))
"""Data sets that share images: MNIST and EMNIST are made of NIST's Special Database 19, and CINIC-10 holds CIFAR-10."""

_PART = 5_000
"""Images that are compared with the private ones at a time, to bound the memory."""

_FORMAT = 1
"""Number of the network and of the training; a change of either needs another one."""


def prior_of(target: AttackedRound, progress: Progress | None = None) -> ImageSpace:
    """Return the space of images that the attacker of a round has learned from its `prior`, see `trained_prior`."""
    root = Path(target.config.data_root) if target.config.data_root else None
    data = target.data()
    private = data.dataset.train.scaled(np.concatenate([data.train_indices(client) for client in target.clients]))
    check_prior(target.prior, target.config.dataset, private, root)
    return trained_prior(target.prior, data.dataset.input_shape, root, progress=progress)


def check_prior(name: str, attacked: str, private: NDArray[np.float32], data_root: Path | None = None) -> None:
    """Check that no private image is among those from which a prior would be learned.

    Equal images are found under any name of the data set; images that were changed, only by the names in
    `OF_ONE_SOURCE`.

    Args:
        name: Data set of the prior.
        attacked: Data set of the private images.
        private: The private images [n, C, H, W] in [0, 1].
        data_root: Folder of the data sets; None for the default.

    Raises:
        ConfigError: If the data sets share images.
        DataError: If there is no data set of this name.
    """
    if {name, attacked} in OF_ONE_SOURCE:
        raise ConfigError(
            f"{name} and {attacked} share images, so that the prior would know them; name another --prior"
        )
    try:
        split = load_dataset(name, data_root).train
    except (ConfigError, DataError) as error:
        raise type(error)(f"the prior cannot be learned from {name!r}: {error}") from None
    if split.images.shape[1:] != private.shape[1:]:
        return
    known = {image.tobytes() for image in private}
    parts = np.array_split(np.arange(len(split)), -(-len(split) // _PART))
    seen = known.intersection(image.tobytes() for part in parts for image in split.scaled(part))
    if seen:
        raise ConfigError(
            f"{len(seen)} of the {len(known)} private images of {attacked} are in {name}, too, so that the prior would "
            f"know them; name another --prior"
        )


def trained_prior(
    name: str,
    input_shape: tuple[int, ...],
    data_root: Path | None = None,
    training: PriorTraining | None = None,
    *,
    base: Path | None = None,
    progress: Progress | None = None,
) -> ImageSpace:
    """Return the space of images that is learned from the training images of a data set, without their labels.

    The decoder is kept in the cache by the content of the images and the settings of the training.

    Args:
        name: Data set, see `hyperfl_flwr.data.registry.load_dataset`.
        input_shape: Shape (C, H, W) of the attacked images.
        data_root: Folder of the data sets; None for the default.
        training: Settings of the training; None for the defaults.
        base: Folder of the cache; None for the user's cache directory.
        progress: Called during the training, see `train_decoder`.

    Raises:
        ConfigError: If the data set has no images.
        DataError: If there is no such data set.
    """
    training = training or PriorTraining()
    images = public_images(name, input_shape, data_root)
    content = hashlib.sha256(images.tobytes())
    content.update(repr((_FORMAT, images.shape, training)).encode())
    path = (base or cache_directory()) / "priors" / f"{content.hexdigest()[:16]}.npz"
    try:
        decoder = {key: torch.from_numpy(value.copy()) for key, value in read_arrays(path)[0].items()}
        if progress is not None:
            progress(training.steps, training.steps)
    except StateError:  # not trained yet, or damaged
        decoder = train_decoder(torch.from_numpy(images), training, progress)
        _keep(path, decoder, name)
    return learned_space(input_shape, decoder, training.width)


def public_images(name: str, input_shape: tuple[int, ...], data_root: Path | None = None) -> NDArray[np.float32]:
    """Return training images [n, C, H, W] in [0, 1] of a data set, in the shape of the attacked ones.

    Images of another size are interpolated bilinearly; of colours, the mean is taken where grey images are attacked.

    Raises:
        ConfigError: If the data set has no images.
        DataError: If there is no such data set.
    """
    split = load_dataset(name, data_root).train
    if split.images.ndim != 4:
        raise ConfigError(f"the prior must be learned from images, {name} has samples {split.images.shape[1:]}")
    rng = numpy_generator(0, "audit", "prior")
    chosen = np.sort(rng.choice(len(split), min(len(split), MOST_IMAGES), replace=False))
    images = torch.from_numpy(split.scaled(chosen))
    if tuple(images.shape[2:]) != tuple(input_shape[1:]):
        images = functional.interpolate(images, input_shape[1:], mode="bilinear", antialias=True)
    return _coloured(images, input_shape[0]).clamp(0, 1).numpy()


def _coloured(images: Tensor, channels: int) -> Tensor:
    """Return images [n, channels, H, W] of images with another number of colour channels."""
    if images.shape[1] == channels:
        return images
    return images.mean(dim=1, keepdim=True).expand(-1, channels, -1, -1).contiguous()


def _keep(path: Path, decoder: dict[str, Tensor], name: str) -> None:
    """Write a decoder to the cache, if the disk takes it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_arrays(path, {key: value.numpy() for key, value in decoder.items()}, {"dataset": name})
    except OSError:
        return  # a full or read-only disk: it is trained again next time
