"""Draw private images above their reconstructions and a control."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

from hyperfl_flwr.attacks.scoring import Match
from hyperfl_flwr.audit.audit import AttackResult, images_of
from hyperfl_flwr.audit.record_round import AttackedRound

MOST_DECIBELS = 150.0
"""Cap for reported PSNR values; that of equal images is infinite."""

SHOWN = 10
"""Largest number of images in a row."""


@dataclass(frozen=True, kw_only=True)
class PictureRow:
    """One row of the picture: the private images, an attack's reconstructions, or a control.

    Attributes:
        label: `private`, the attack's name, or `unrelated`.
        images: [n, C, H, W] in [0, 1], in the order of the private images; at most `SHOWN`.
        psnr: PSNR of each image against the private one, in dB, at most `MOST_DECIBELS`; None for the private images.
    """

    label: str
    images: NDArray[np.float32]
    psnr: Sequence[float] | None


def picture_rows(target: AttackedRound, findings: Mapping[str, AttackResult]) -> list[PictureRow]:
    """Return the rows: the private images, each attack's reconstructions, and the unrelated control."""
    private = np.concatenate([images_of(target, client)[0] for client in target.clients])
    rows = [PictureRow(label="private", images=private[:SHOWN], psnr=None)]
    for name, finding in findings.items():
        if finding.comparisons:
            rows.append(_row(name, [comparison.matched for comparison in finding.comparisons]))
    others = next((finding.comparisons for finding in findings.values() if finding.comparisons), ())
    if others:
        rows.append(_row("unrelated", [comparison.unrelated for comparison in others]))
    return rows


def _row(label: str, matches: Sequence[Match]) -> PictureRow:
    images = np.concatenate([match.images for match in matches])[:SHOWN]
    psnr = np.concatenate([match.psnr for match in matches])[:SHOWN]
    return PictureRow(label=label, images=images, psnr=[float(value) for value in np.minimum(psnr, MOST_DECIBELS)])


def draw_rows(rows: Sequence[PictureRow]) -> Figure:
    """Draw the rows, one below the other."""
    number = len(rows[0].images)
    figure = Figure(figsize=(1.1 * number + 1.4, 1.3 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    for line, row in zip(figure.subplots(len(rows), number, squeeze=False), rows, strict=True):
        line[0].set_ylabel(row.label, fontsize="small", rotation=0, ha="right", va="center")
        for position, panel in enumerate(line):
            image = np.moveaxis(row.images[position], 0, -1)
            panel.imshow(image.squeeze(), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
            panel.set_xticks([])
            panel.set_yticks([])
            if row.psnr is not None:
                panel.set_xlabel(f"{row.psnr[position]:.1f} dB", fontsize="x-small")
    return figure
