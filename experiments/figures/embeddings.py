"""Test and draw whether the clients' learned embeddings separate the groups that the clients' data come from.

Guo et al., AAAI 2025, figure 8(b), shows the t-SNE of the embeddings of 20 clients, and sees three clusters in it.
t-SNE (van der Maaten and Hinton, JMLR 2008) also produces clusters from noise. The picture therefore also shows the two
principal components, and numbers that are computed from the embeddings themselves.

Embeddings never leave a client. A simulation keeps its clients' private files in the run's folder; the embeddings are
read from there only if the caller explicitly allows it.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from sklearn.decomposition import PCA
from sklearn.manifold import TSNE
from sklearn.metrics import silhouette_score
from sklearn.neighbors import NearestNeighbors

from experiments.figures.results import new_figure
from hyperfl_flwr.core.errors import RunDirectoryError
from hyperfl_flwr.core.plurals import counted
from hyperfl_flwr.data.partition.equal_size import dominant_classes
from hyperfl_flwr.node.private_state import INITIAL, PrivateState
from hyperfl_flwr.runs.checkpoint import Checkpoints
from hyperfl_flwr.runs.figures.labels import literal
from hyperfl_flwr.runs.listed_clients import label_rows
from hyperfl_flwr.runs.run_data import RunData
from hyperfl_flwr.runs.run_directory import read_manifest

Vectors = npt.NDArray[np.float64]
Groups = npt.NDArray[np.int64]

SHUFFLES = 2000
"""Number of random groupings that the silhouette is compared with."""

PERPLEXITY = 5.0
"""Perplexity of t-SNE; less if there are few clients."""

GROUP_STYLES = [("o", "#0072b2"), ("s", "#e69f00"), ("^", "#009e73"), ("D", "#cc79a7"), ("v", "#000000")]
"""Marker and colour of each group, which can be distinguished without colours."""


@dataclass(frozen=True, kw_only=True)
class Separation:
    """Measures of how well embeddings separate known groups.

    Attributes:
        clients: Number of embeddings.
        groups: Number of groups.
        silhouette: Mean silhouette in [-1, 1], 1 if groups are tight and far apart (Rousseeuw 1987).
        p_value: Share of random groupings of the same sizes with a silhouette at least as high.
        neighbours: Share of clients with their nearest embedding in the same group.
        neighbours_by_chance: Mean of this share over random groupings.
        spread: Mean distance of the embeddings from their mean.
        norm: Mean norm of the embeddings.
    """

    clients: int
    groups: int
    silhouette: float
    p_value: float
    neighbours: float
    neighbours_by_chance: float
    spread: float
    norm: float


def read_embeddings(run: Path) -> tuple[Vectors, int]:
    """Read the embeddings of all clients after a simulated run's last checkpoint, [N, d], by ascending id; its round.

    Raises:
        RunDirectoryError: If the run has no checkpoint, or its clients keep no embeddings.
    """
    manifest, checkpoints = read_manifest(run), Checkpoints(run / "checkpoints")
    if not checkpoints.rounds():
        raise RunDirectoryError(f"{run} has no checkpoint; choose a run that has finished at least one")
    _, progress = checkpoints.load(checkpoints.rounds()[-1])
    found = []
    for client, version in sorted(progress.versions.items()):
        if version == INITIAL:
            raise RunDirectoryError(f"{run} has not trained client {client}; choose a run with last-round = all")
        arrays = PrivateState(run / "clients", manifest["experiment"], client).load(version)
        if "embedding/v" not in arrays:
            raise RunDirectoryError(f"the clients of {run} have no embeddings; choose a run of the method hyperfl")
        found.append(arrays["embedding/v"])
    return np.stack(found).astype(np.float64), progress.round


def groups_of(label_counts: npt.NDArray[np.int64]) -> Groups:
    """Return the group of the similarity partition that each client's training data come from, [N].

    Args:
        label_counts: Number of training samples of each client and class, [N, K].
    """
    classes = dominant_classes(label_counts.shape[1])
    in_group = np.stack([label_counts[:, group].sum(axis=1) for group in classes])
    return np.asarray(in_group.argmax(axis=0), dtype=np.int64)


def separation(vectors: Vectors, groups: Groups, rng: np.random.Generator) -> Separation:
    """Measure how well vectors [N, d] separate groups [N]; at least two groups, and more clients than groups."""
    value = float(silhouette_score(vectors, groups))
    shuffled = [rng.permutation(groups) for _ in range(SHUFFLES)]
    nearest = NearestNeighbors(n_neighbors=1).fit(vectors).kneighbors(return_distance=False)[:, 0]
    # In the p-value the observed grouping counts as one of the random ones, so that it is never 0.
    return Separation(
        clients=len(groups),
        groups=len(np.unique(groups)),
        silhouette=value,
        p_value=(1 + sum(silhouette_score(vectors, permuted) >= value for permuted in shuffled)) / (1 + SHUFFLES),
        neighbours=float(np.mean(groups[nearest] == groups)),
        neighbours_by_chance=float(np.mean([permuted[nearest] == permuted for permuted in shuffled])),
        spread=float(np.linalg.norm(vectors - vectors.mean(axis=0), axis=1).mean()),
        norm=float(np.linalg.norm(vectors, axis=1).mean()),
    )


def draw_embeddings(run: Path, picture: Path) -> Separation:
    """Draw the embeddings of a simulated run by group, and write the measures to a JSON file next to the picture.

    Args:
        run: Folder of a simulation with the similarity partition.
        picture: Path of the picture.

    Raises:
        RunDirectoryError: If the run's clients have no embeddings, or their groups are unknown or too few.
    """
    manifest = read_manifest(run)
    if "label_counts" not in manifest or manifest["settings"]["data.partition"] != "similarity":
        raise RunDirectoryError(f"{run} is not a simulation with data.partition = similarity: its groups are unknown")
    groups = groups_of(np.array(label_rows(manifest)))
    vectors, rounds = read_embeddings(run)
    if vectors.shape[1] < 2:
        raise RunDirectoryError(f"the embeddings of {run} have one dimension; two are needed (hyperfl.embedding-dim)")
    number = len(np.unique(groups))
    if not 1 < number < len(groups):
        raise RunDirectoryError(
            f"{run} has {len(groups)} clients of {number} groups; at least two groups and more clients are needed"
        )
    found = separation(vectors, groups, np.random.default_rng(0))
    figure = new_figure(9, 4)
    left, right = figure.subplots(1, 2)
    perplexity = min(PERPLEXITY, (len(vectors) - 1) / 3)
    _points(left, TSNE(perplexity=perplexity, init="pca", random_state=0).fit_transform(vectors), groups)
    left.set_title(f"t-SNE, perplexity {perplexity:.3g}", fontsize="medium")
    analysis = PCA(2).fit(vectors)
    _points(right, analysis.transform(vectors), groups)
    shares = [f"{100 * share:.0f} %" for share in analysis.explained_variance_ratio_]
    right.set_title(f"principal components ({shares[0]} and {shares[1]} of the variance)", fontsize="medium")
    figure.legend(
        *left.get_legend_handles_labels(), loc="outside lower center", ncols=len(GROUP_STYLES), fontsize="small"
    )
    own, chance = 100 * found.neighbours, 100 * found.neighbours_by_chance
    figure.suptitle(
        f"private embeddings of {len(vectors)} simulated clients after {counted(rounds, 'round')} on "
        f"{literal(RunData.read(manifest).title)}\n"
        f"silhouette of the groups {found.silhouette:.2f} (p = {found.p_value:.4f}); "
        f"nearest embedding of the same group: {own:.0f} % (by chance {chance:.0f} %)",
        fontsize="small",
    )
    figure.savefig(picture, dpi=120)
    picture.with_suffix(".json").write_text(json.dumps(asdict(found), indent=2) + "\n")
    return found


def _points(axes: Axes, places: Vectors, groups: Groups) -> None:
    for group in np.unique(groups):
        marker, colour = GROUP_STYLES[group % len(GROUP_STYLES)]
        members = places[groups == group]
        axes.scatter(members[:, 0], members[:, 1], marker=marker, c=colour, edgecolors="k", label=f"group {group}")
    axes.set_xticks([])
    axes.set_yticks([])


def pictures_of(runs: Sequence[tuple[str, Path]], folder: Path) -> list[Path]:
    """Draw the embeddings of several runs, see `draw_embeddings`.

    Args:
        runs: Name and folder of each run.
        folder: Folder of the pictures.

    Returns:
        Paths of the pictures, `embeddings-NAME.png`.
    """
    pictures = []
    for name, run in runs:
        pictures.append(folder / f"embeddings-{name}.png")
        draw_embeddings(run, pictures[-1])
    return pictures
