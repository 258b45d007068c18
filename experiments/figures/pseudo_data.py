"""Measure and draw the divergence of PRIV-HFL's pseudo-data from the clients' private data, by class.

Najafi et al., PRIV-HFL, figure 7, shows the Kullback-Leibler divergence of the pseudo-data P from the private data Q of
each class over the rounds, without specifying the estimator. Here all private training images of a simulation, and
`PER_CLASS` pseudo-images of each class, are projected onto the first principal components of the private images. Each
class is modelled as a Gaussian there (covariances by Ledoit and Wolf, 2004), and

    KL(P || Q) = 1/2 (tr(C_q^-1 C_p) + (m_q - m_p)^T C_q^-1 (m_q - m_p) - d + ln det C_q - ln det C_p)    in nats.

It only compares means and covariances in d dimensions. A simulation's private images are read from the files of its
data set; the clients' private state is not read.
"""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from sklearn.covariance import LedoitWolf
from sklearn.decomposition import PCA

from experiments.figures.results import new_figure
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.errors import RunDirectoryError
from hyperfl_flwr.core.files.storage import read_arrays
from hyperfl_flwr.core.rng import torch_generator
from hyperfl_flwr.data.federated_data import FederatedData, load_federated_data
from hyperfl_flwr.methods.priv_hfl import PrivHFLConfig
from hyperfl_flwr.models.generator import NOISE_DIM, Generator, kept_generators
from hyperfl_flwr.runs.figures.colours import PALETTE
from hyperfl_flwr.runs.run_data import require_dataset
from hyperfl_flwr.runs.run_directory import read_manifest

DIMENSIONS = 16
"""Number of principal components d."""

PER_CLASS = 500
"""Number of pseudo-images of each class."""

SHOWN = 8
"""Number of images of each class in the picture."""

Matrix = npt.NDArray[np.float64]
Images = npt.NDArray[np.float32]


def gaussian_divergence(p: Matrix, q: Matrix) -> float:
    """Return KL(P || Q) in nats between Gaussians that are fitted to two samples.

    Args:
        p: Points [n, d], n at least 2.
        q: Points [m, d], m above d.
    """
    of_p, of_q = LedoitWolf().fit(p), LedoitWolf().fit(q)
    inverse, shift = np.linalg.inv(of_q.covariance_), of_q.location_ - of_p.location_
    volumes = np.linalg.slogdet(of_q.covariance_)[1] - np.linalg.slogdet(of_p.covariance_)[1]
    return float((np.trace(inverse @ of_p.covariance_) + shift @ inverse @ shift - p.shape[1] + volumes) / 2)


class PseudoStudy:
    """The pseudo-data of a simulated run that has kept its generators (`priv-hfl.keep-generators`).

    Attributes:
        paths: The kept generators' files by round.

    Args:
        run: The run's folder; the data are read from the run's data folder.

    Raises:
        RunDirectoryError: If the run has kept no generators, or its data are not on this machine.
    """

    def __init__(self, run: Path) -> None:
        require_dataset(run)
        self.config = RunConfig.from_flat(read_manifest(run)["settings"])
        self.paths = kept_generators(run)
        if not self.paths:
            raise RunDirectoryError(f"{run} has kept no generators; run it with priv-hfl.keep-generators = 1")
        self.data: FederatedData = load_federated_data(self.config.data_settings())

    def images(self, number: int, per_class: int = PER_CLASS) -> Images:
        """Return pseudo-images [K, per_class, C, H, W] of the generator after a round, normalised as the data.

        Batches have `priv-hfl.pseudo-samples` samples of all classes, as in training: BatchNorm uses their statistics.
        """
        dataset = self.data.dataset
        width = self.config.section(PrivHFLConfig).generator_width
        generator = Generator(dataset.input_shape, dataset.num_classes, width)
        arrays, _ = read_arrays(self.paths[number])
        generator.load_state_dict({name: torch.from_numpy(value) for name, value in arrays.items()}, assign=True)
        rng = torch_generator(self.config.seed, "pseudo-study")
        labels = torch.arange(dataset.num_classes).repeat_interleave(per_class)
        order = torch.randperm(len(labels), generator=rng)
        made = torch.empty(len(labels), *dataset.input_shape)
        with torch.no_grad():
            # Ceiling division into nearly equal batches: a short last one would have poor statistics.
            size = self.config.section(PrivHFLConfig).pseudo_samples
            for chosen in torch.tensor_split(order, -(-len(order) // size)):
                noise = torch.randn(len(chosen), NOISE_DIM, generator=rng)
                made[chosen] = generator(noise, labels[chosen])
        images: Images = made.view(dataset.num_classes, per_class, *dataset.input_shape).numpy()
        return images

    def private(self) -> tuple[Images, npt.NDArray[np.int64]]:
        """Return all clients' training images [n, C, H, W], normalised, and labels [n]."""
        clients = [self.data.client(client) for client in range(self.config.num_clients)]
        images = torch.cat([client.train_images for client in clients]).numpy()
        return images, torch.cat([client.train_labels for client in clients]).numpy()

    def divergences(self) -> dict[int, list[float]]:
        """Return KL of each class [K] by round, see the module; NaN for a class without more private images than d."""
        images, labels = self.private()
        flat = images.reshape(len(images), -1)
        # Fitted to the private images alone, so that all rounds are compared in one projection.
        projection = PCA(min(DIMENSIONS, *flat.shape), random_state=0).fit(flat)
        private = projection.transform(flat).astype(np.float64)
        found: dict[int, list[float]] = {}
        for number in self.paths:
            made = [
                projection.transform(images.reshape(len(images), -1)).astype(np.float64)
                for images in self.images(number)
            ]
            own = [private[labels == label] for label in range(len(made))]
            dimensions = private.shape[1]
            found[number] = [
                gaussian_divergence(p, q) if len(q) > dimensions else float("nan")
                for p, q in zip(made, own, strict=True)
            ]
        return found


def draw_pseudo_data(run: Path, picture: Path) -> None:
    """Draw the divergences over the rounds and the last round's images, and write the divergences to a CSV file.

    Args:
        run: The run's folder, see `PseudoStudy`.
        picture: Path of the picture; the CSV file is next to it.
    """
    study = PseudoStudy(run)
    found, last = study.divergences(), max(study.paths)
    with picture.with_suffix(".csv").open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["round", *(f"class-{label}" for label in range(len(found[last])))])
        writer.writerows([number, *values] for number, values in found.items())
    figure = new_figure(10, 4.6)
    left, middle, right = figure.subplots(1, 3, width_ratios=(1.2, 1, 1))
    _draw_divergences(left, found)
    images, labels = study.private()
    real = [images[labels == label][:SHOWN] for label in range(len(found[last]))]
    for axes, rows, title in (
        (middle, study.images(last, SHOWN), f"pseudo-data after round {last}"),
        (right, real, "private data"),
    ):
        axes.imshow(_sheet(rows, study), cmap="gray")
        axes.set_title(title, fontsize="medium")
        axes.axis("off")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=10, fontsize="small")
    figure.savefig(picture, dpi=120)


def _draw_divergences(axes: Axes, found: Mapping[int, Sequence[float]]) -> None:
    for label, curve in enumerate(np.array(list(found.values())).T):
        if not np.isfinite(curve).any():  # too few private images
            continue
        line, marker, colour = "-" if label < 5 else "--", "os^dvPX*<>"[label % 10], PALETTE[label % 5]
        axes.plot(list(found), curve, line, marker=marker, color=colour, mfc="white", label=str(label), markevery=0.1)
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("round")
    axes.set_ylabel("KL(pseudo || private) in nats, by class")


def _sheet(rows: Sequence[Images] | Images, study: PseudoStudy) -> Images:
    """Return one picture in [0, 1] with a class in each row and a pixel between images; grey ones have no channels."""
    channels, height, width = (size + (axis > 0) for axis, size in enumerate(study.data.dataset.input_shape))
    sheet = np.ones((len(rows) * height, SHOWN * width, channels), np.float32)
    mean, std = np.array(study.data.dataset.mean), np.array(study.data.dataset.std)
    for row, images in enumerate(rows):
        for column, image in enumerate(images):
            pixels = (image.transpose(1, 2, 0) * std + mean).clip(0, 1)
            top, left = row * height, column * width
            sheet[top : top + height - 1, left : left + width - 1] = pixels
    return sheet[:, :, 0] if channels == 1 else sheet
