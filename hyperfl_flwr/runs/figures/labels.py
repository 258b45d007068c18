"""Texts of users in figures."""


def literal(text: str) -> str:
    """Return a text that Matplotlib shows as it is, such as a label or the name of a file.

    Matplotlib takes what stands between two dollar signs for a formula, and leaves a label that begins with an
    underscore out of the legend.
    """
    shown = text.replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown
