"""Parses a page of this project, and checks the rules for every page."""

import html.parser
from typing import Any

VOID = {"meta", "img"}
"""Elements without an end tag."""


class Page(html.parser.HTMLParser):
    """The headings, table rows and sources of a page; a page that breaks a rule raises an AssertionError.

    Args:
        text: The page. An unclosed tag, a heading out of order, a script, a source outside the page, a duplicate id, an
            image without a description, a table heading without a scope and a table that cannot be scrolled are errors.

    Attributes:
        title: Title of the page.
        headings: Headings, in order.
        table_rows: Cells of each table row, in order.
        rows: First cell of each table row -> its other cells, as a list, or as a text if there is only one.
        changed: Names of the settings that are listed as different from the defaults.
        sources: Sources of the images.
        figures: Descriptions of the SVG figures.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.title, self.headings, self.rows, self.changed = "", [], {}, []
        self.sources, self.figures, self.table_rows = [], [], []
        self._open: list[tuple[str, dict[str, Any]]] = []
        self._level, self._ids, self._cells = 0, set(), []
        self.feed(text)
        assert self._open == []
        assert text.startswith("<!doctype html>")
        assert self.title == self.headings[0]
        policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
        assert f'"Content-Security-Policy" content="{policy}"' in text
        assert text.count("@media (prefers-color-scheme: dark)") == 1

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        assert tag not in ("script", "link", "iframe", "object")
        assert not [name for name in values if name.startswith("on")]
        if "id" in values:
            assert values["id"] not in self._ids
            self._ids.add(values["id"])
        for name in ("src", "href", "xlink:href"):
            assert values.get(name, "#").startswith(("#", "data:image/png;base64,"))
        if tag == "html":
            assert values["lang"] == "en"
        if tag == "img":
            assert values["alt"]
            self.sources.append(values["src"])
        if tag == "svg":
            assert values["role"] == "img"
            self.figures.append(values["aria-label"])
        if tag == "th":
            assert values["scope"] in ("col", "row")
        if tag in ("h1", "h2", "h3"):
            assert int(tag[1]) <= self._level + 1
            self._level = int(tag[1])
            self.headings.append("")
        if tag == "tr":
            self._cells = []
        if tag in ("td", "th"):
            self._cells.append("")
        if tag == "table":
            assert [each["tabindex"] for name, each in self._open if each.get("class") == "scroll"] == ["0"]
        if tag not in VOID:
            self._open.append((tag, values))

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self._open.pop()[0] == tag
        if tag == "tr" and self._cells:
            self.table_rows.append(self._cells)
            name, *others = self._cells
            self.rows[name] = others[0] if len(others) == 1 else others
            if any("differ from the defaults" in each.get("aria-label", "") for _, each in self._open):
                self.changed.append(name)

    def handle_data(self, data):
        tags = [tag for tag, _ in self._open]
        if "svg" in tags or not tags:
            return
        if "td" in tags or "th" in tags:
            self._cells[-1] += data
        if tags[-1] in ("h1", "h2", "h3"):
            self.headings[-1] += data
        if tags[-1] == "title":
            self.title += data
