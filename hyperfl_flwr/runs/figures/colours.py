"""Colours of figures, which colour-blind readers can distinguish: M. Okabe and K. Ito, Color Universal Design, 2008.

Curves differ in line or marker, too, so that figures are readable in black and white.
"""

INK, RULES = "#1b1f24", "#c9ced4"
"""Colours of text and axes, and of the grid."""

BLUE, VERMILLION = "#0072b2", "#d55e00"
COLOURS = (BLUE, VERMILLION, "#009e73", "#cc79a7")
"""Colours of data; pages show each as a colour of their theme."""

PALETTE = (*COLOURS, INK, "#56b4e9", "#e69f00", "#f0e442")
"""Colours of data where four are too few; the last, yellow, is weak on white."""

CONTROL = "0.6"
"""Colour of controls, which are data of nobody."""
