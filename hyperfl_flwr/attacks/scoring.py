"""Score reconstructions: assignment to the private images, two controls, and a verdict.

The order of images within a batch is unknown, and among many candidates one is always a little similar to a private
image. So candidates are assigned to private images one to one with the smallest total squared error, and compared with
two controls that use nothing of the client: the same assignment of equally many unrelated images, and the mean image.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import cdist

Images = NDArray[np.float32]

Verdict = Literal["recovered", "recovered some", "recovered nothing"]

MARGIN = 1.0
"""dB by which the median image must beat the better control."""

CLEAR_MARGIN = 6.0
"""dB (a quarter of the squared error) by which a single image counts as recovered."""

FAR_MARGIN = 12.0
"""dB (a sixteenth) by which hardly any unrelated image is ahead, whatever the number of images."""

MARGINS = (CLEAR_MARGIN, FAR_MARGIN)

SIGNIFICANCE = 0.05


@dataclass(frozen=True, kw_only=True, eq=False)
class Match:
    """Private images and the candidates assigned to them.

    Attributes:
        images: The candidates, in the order of the private images, [n, C, H, W].
        order: Positions of these among all candidates, [n].
        private: The private images in the form with which the candidates are compared, [n, C, H, W].
        psnr: PSNR in dB for data range 1, [n]; infinite for equal images.
    """

    images: Images
    order: NDArray[np.int64]
    private: Images
    psnr: NDArray[np.float64]


Forms = Callable[[Images], Images]
"""Maps one image [C, H, W] to all forms [v, C, H, W] in which clients may have trained on it."""


def match(candidates: Images, private: Images, forms: Forms | None = None) -> Match:
    """Assign one candidate to each private image, with the smallest sum of squared errors.

    Args:
        candidates: Images [m, C, H, W] in [0, 1], m >= n.
        private: Images [n, C, H, W] in [0, 1].
        forms: Of its forms, a private image is compared in the one that is nearest to the candidate; None if clients
            trained on the images as they are.

    Raises:
        ValueError: If there are fewer candidates than images, or the shapes differ.
    """
    if len(candidates) < len(private) or candidates.shape[1:] != private.shape[1:]:
        raise ValueError(f"cannot assign candidates {candidates.shape} to images {private.shape}")
    flat = _flat(candidates)
    if forms is None:
        errors = cdist(_flat(private), flat, "sqeuclidean")
    else:
        errors = np.stack([_distances(_flat(forms(image)), flat).min(axis=0) for image in private])
    _, columns = linear_sum_assignment(errors)
    found, compared = candidates[columns], private
    if forms is not None:
        compared = np.stack([_nearest(forms(image), own) for image, own in zip(private, found, strict=True)])
    return Match(images=found, order=columns, private=compared, psnr=_decibels(_mean_squares(compared, found)))


def _nearest(forms: Images, candidate: Images) -> Images:
    """Return the form [C, H, W] that is nearest to a candidate."""
    chosen: Images = forms[int(_mean_squares(forms, candidate).argmin())]
    return chosen


def _mean_squares(images: Images, others: Images) -> NDArray[np.float64]:
    """Return the mean squared error [n] of each image, compared with one or with equally many others."""
    errors: NDArray[np.float64] = np.square(_flat(images) - others.reshape(-1, images[0].size)).mean(axis=1)
    return errors


def _distances(rows: NDArray[np.float64], columns: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the squared distances [n, m] by a matrix product: much faster than `cdist`, with an error near 1e-12."""
    squares = np.square(rows).sum(axis=1)[:, None] + np.square(columns).sum(axis=1)
    found: NDArray[np.float64] = squares - 2 * rows @ columns.T
    return found


def _flat(images: Images) -> NDArray[np.float64]:
    return images.reshape(len(images), -1).astype(np.float64)


@dataclass(frozen=True, kw_only=True, eq=False)
class Comparison:
    """Scores of an attack on some private images and of its controls.

    Attributes:
        matched: Assigned reconstructions.
        unrelated: Assigned unrelated images.
        mean_image: PSNR of the mean image in dB, [n].
    """

    matched: Match
    unrelated: Match
    mean_image: NDArray[np.float64]

    @property
    def advantage(self) -> NDArray[np.float64]:
        """PSNR of the attack minus that of the better control, in dB, [n]."""
        return self.matched.psnr - np.maximum(self.unrelated.psnr, self.mean_image)

    @property
    def recovered(self) -> NDArray[np.bool_]:
        """Whether each image counts as recovered, [n]: see `ahead`."""
        return self.ahead(CLEAR_MARGIN)

    def ahead(self, margin: float) -> NDArray[np.bool_]:
        """Return whether the attack is a margin in dB ahead of the better control, for each image, [n].

        Of the images to which equal candidates are assigned, only the one that is furthest ahead counts: an attack that
        has found one image has not found two that resemble it.
        """
        return _ahead(self.advantage, self.matched.images, margin)

    def ahead_by_chance(self, margin: float) -> NDArray[np.bool_]:
        """Return the same with attack and unrelated images exchanged, [n].

        An attack whose images are as unrelated to the client has as many in `ahead` as here, on average.
        """
        advantage = self.unrelated.psnr - np.maximum(self.matched.psnr, self.mean_image)
        return _ahead(advantage, self.unrelated.images, margin)


def _ahead(advantage: NDArray[np.float64], candidates: Images, margin: float) -> NDArray[np.bool_]:
    """Return which images are a margin ahead, of those with equal candidates the one that is furthest, [n]."""
    found = np.zeros(len(advantage), dtype=np.bool_)
    counted = set()
    for position in np.argsort(-advantage, kind="stable"):
        candidate = candidates[position].tobytes()
        found[position] = advantage[position] >= margin and candidate not in counted
        counted.add(candidate)
    return found


def compare(
    reconstructed: Images, private: Images, unrelated: Images, mean_image: Images, forms: Forms | None = None
) -> Comparison:
    """Compare a client's reconstructions with its images, together with both controls.

    Args:
        reconstructed: Images [m, C, H, W], m >= n.
        private: Images [n, C, H, W].
        unrelated: Images of the same kind that the client does not hold. As many as reconstructions make a fair
            control, more make a stricter one.
        mean_image: Mean [C, H, W] of images that the client does not hold.
        forms: See `match`; it is the same for the reconstructions and both controls.

    Raises:
        ValueError: If there are fewer reconstructions or unrelated images than private ones.
    """
    return Comparison(
        matched=match(reconstructed, private, forms),
        unrelated=match(unrelated, private, forms),
        mean_image=psnr_in_order(np.broadcast_to(mean_image, private.shape), private, forms),
    )


def psnr_in_order(images: Images, private: Images, forms: Forms | None = None) -> NDArray[np.float64]:
    """Return the PSNR in dB [n] of images [n, C, H, W], each compared with the private image at its position.

    Args:
        images: Images [n, C, H, W].
        private: Private images [n, C, H, W].
        forms: See `match`.
    """
    if forms is not None:
        private = np.stack([_nearest(forms(image), own) for image, own in zip(private, images, strict=True)])
    return _decibels(_mean_squares(private, images))


def number_recovered(comparisons: Sequence[Comparison]) -> int:
    """Return the number of images of all clients that count as recovered."""
    return int(sum(comparison.recovered.sum() for comparison in comparisons))


def number_by_chance(comparisons: Sequence[Comparison]) -> int:
    """Return the number of images of all clients for which unrelated images are as far ahead of the attack."""
    return int(sum(comparison.ahead_by_chance(CLEAR_MARGIN).sum() for comparison in comparisons))


def verdict(comparisons: Sequence[Comparison]) -> Verdict:
    """Judge an attack over all images of all clients.

    The rule uses each image's advantage: its PSNR minus that of the better of its two controls.

    - `recovered`: the median advantage is above 1 dB, and advantages are larger than zero by a one-sided Wilcoxon
      signed-rank test at 5 %. Fewer than five images cannot pass that test: then every one must be 6 dB ahead.
    - `recovered some`: otherwise, if at least one image is 6 dB ahead (a quarter of the squared error). Among many
      images some are so by chance. So where unrelated images are 6 dB ahead of the attack, too, there must be more of
      the attack's, by a one-sided sign test at 5 %, or the same must hold at 12 dB.
    - `recovered nothing`: otherwise.

    Raises:
        ValueError: If there are no images.
    """
    if not comparisons:
        raise ValueError("a verdict needs at least one comparison")
    advantages = np.concatenate([comparison.advantage for comparison in comparisons])
    some: Verdict = "recovered some" if any(_more(comparisons, by) for by in MARGINS) else "recovered nothing"
    if len(advantages) < 5:
        return "recovered" if number_recovered(comparisons) == len(advantages) else some
    from scipy.stats import wilcoxon  # deferred: takes half a second, and only this needs it

    # A rank test needs finite numbers; an exact reconstruction (infinite PSNR) ranks above all others.
    finite = np.nan_to_num(advantages, nan=-1e3, posinf=1e3, neginf=-1e3)
    significant = np.any(finite) and wilcoxon(finite, alternative="greater").pvalue < SIGNIFICANCE
    if significant and np.median(finite) > MARGIN:
        return "recovered"
    return some


def _more(comparisons: Sequence[Comparison], margin: float) -> bool:
    """Return whether the attack is ahead in at least one image, and in more than the unrelated images."""
    ours = sum(int(each.ahead(margin).sum()) for each in comparisons)
    chance = sum(int(each.ahead_by_chance(margin).sum()) for each in comparisons)
    if not ours or not chance:
        return ours > 0
    from scipy.stats import binomtest  # deferred, see `verdict`

    return bool(binomtest(ours, ours + chance, alternative="greater").pvalue < SIGNIFICANCE)


def _decibels(errors: NDArray[np.float64]) -> NDArray[np.float64]:
    with np.errstate(divide="ignore"):
        return -10 * np.log10(errors)
