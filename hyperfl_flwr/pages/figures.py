"""Embed figures and images in a page: figures as SVG in the colours of its theme, small images as PNG."""

import base64
import io
import re
from collections.abc import Mapping

import numpy as np
from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image

from hyperfl_flwr.runs.figures.colours import COLOURS, INK, RULES
from hyperfl_flwr.runs.figures.plots import STYLE

THEME = {INK: "ink", RULES: "rules"} | dict(zip(COLOURS, ("blue", "vermillion", "green", "purple"), strict=True))
"""Colours of figures and the variables of `templates/page.css` that have a value for each theme."""

_NOTHING = dict.fromkeys(("Date", "Creator", "Format", "Type"))
"""Matplotlib's metadata, left out so that equal figures are equal files."""


def svg(figure: Figure, name: str, description: str) -> Markup:
    """Return a figure as an SVG element for an HTML page; equal figures give equal text.

    Args:
        figure: Figure drawn with `hyperfl_flwr.runs.figures.plots.STYLE`.
        name: Name of letters and hyphens, unique on its page: ids begin with it.
        description: Text alternative of the figure, for screen readers.
    """
    stream = io.StringIO()
    with rc_context({**STYLE, "svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(stream, format="svg", transparent=True, metadata=_NOTHING)
    text = stream.getvalue()
    text = text[text.index("<svg ") :]  # without XML's declaration and document type
    text = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", text, count=1, flags=re.DOTALL)  # it is in page.css
    text = re.sub(r' id="[\w.]+_\d+"', "", text)  # names of groups, equal in all figures; nothing refers to them
    text = re.sub(r'( id="|"#|url\(#)', rf"\g<1>{name}-", text)
    text = re.sub(r" font-family: [^;]+;", "", text)
    for colour, variable in THEME.items():
        text = text.replace(colour, f"var(--{variable})")
    label = Markup(' role="img" aria-label="{}" ').format(description)
    text = re.sub(r' width="[\d.]+pt" height="[\d.]+pt" ', lambda _: str(label), text, count=1)
    return Markup(text)  # noqa: S704 - written by matplotlib, which escapes all labels


def captioned(figures: Mapping[str, Figure]) -> list[tuple[str, Markup]]:
    """Return the caption and the SVG element of each figure of a page, by captions that begin with a small letter."""
    return [
        (caption[0].upper() + caption[1:], svg(figure, f"figure-{number}", caption))
        for number, (caption, figure) in enumerate(figures.items())
    ]


def image_source(image: NDArray[np.float32]) -> str:
    """Return an image [C, H, W] in [0, 1] with one or three channels as a data URI of a PNG with the same pixels."""
    pixels = np.moveaxis(np.clip(np.rint(255 * image), 0, 255).astype(np.uint8), 0, -1)
    stream = io.BytesIO()
    Image.fromarray(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels).save(stream, format="png")
    return f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}"
