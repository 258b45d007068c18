"""What MkDocs does to the pages of the site besides rendering them, see `hooks` in `mkdocs.yml`."""

import re

PARTS = re.compile(r"(<pre\b.*?</pre>|<[^>]*>)", re.DOTALL)
"""Blocks of code and tags; what is between two of them is text."""

BEFORE_UNIT = re.compile(r"(?<=\d)\s(?=±|%|[kMG]B\b|dB\b|ms\b)|(?<=±)\s(?=\d)")
"""Spaces of a number, such as those of `89.4 ± 0.2 %`."""

OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
"""Options of commands; a browser would end a line between their two hyphens."""


def on_page_content(html: str, **_: object) -> str:
    """Keep numbers together with their units, and options in inline code whole, where a line ends."""
    parts = PARTS.split(html)
    in_code = False
    for place, part in enumerate(parts):
        if place % 2:  # a block or a tag
            in_code = part.startswith("<code") or (in_code and not part.startswith("</code"))
        elif in_code:
            parts[place] = OPTION.sub(r'<span class="whole">\g<0></span>', part)
        else:
            parts[place] = BEFORE_UNIT.sub("\N{NO-BREAK SPACE}", part)
    return "".join(parts)
