"""The documentation site: it builds without warnings, its links are valid, and it loads nothing from other hosts."""

import importlib.util
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

import pytest
from markdown.extensions.toc import slugify

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"

pytestmark = [
    pytest.mark.skipif(not (ROOT / "mkdocs.yml").is_file(), reason="needs a checkout of the project"),
    pytest.mark.skipif(
        importlib.util.find_spec("mkdocs") is None, reason="MKDOCS IS MISSING: install the extra `docs`"
    ),
]

LOADED = {
    "img": "src",
    "script": "src",
    "link": "href",
    "iframe": "src",
    "object": "data",
    "source": "src",
    "image": "href",
}
"""Elements for which a browser loads a file -> the attribute with the file's address."""


class Page(HTMLParser):
    """The anchors and references of a page of the site.

    Attributes:
        anchors: Ids and names of its elements.
        links: Targets of its links.
        loaded: Addresses of the files that a browser loads to show it.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value is not None}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag in LOADED and values.get("rel") not in ("canonical", "next", "prev") and LOADED[tag] in values:
            self.loaded.append(values[LOADED[tag]])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site strictly and return its folder."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    """Return the site's pages by their files."""
    found = {path: Page(path.read_text()) for path in site.rglob("*.html")}
    assert len(found) > 20
    return found


def written_pages() -> list[Path]:
    """Return the Markdown files of the site and those beside it."""
    pages = list(DOCS.rglob("*.md"))
    assert len(pages) > 20
    return [*pages, *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))]


def test_every_page_of_the_folder_is_in_the_site(site: Path) -> None:
    written = {path.relative_to(DOCS).with_suffix(".html") for path in DOCS.rglob("*.md")}
    assert len(written) > 20
    assert {path for path in written if not (site / path).is_file()} == set()


def test_every_internal_link_leads_to_a_page_and_its_anchor(pages: dict[Path, Page]) -> None:
    """Links of the navigation and of the generated reference are valid; mkdocs itself checks those of the Markdown."""
    broken, seen = [], 0
    for path, page in pages.items():
        if path.name == "404.html":  # its links depend on the address that serves the site
            continue
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme:
                continue
            seen += 1
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            if target not in pages:
                if not target.is_file():
                    broken.append(f"{path.name}: {link}")
            elif parts.fragment and unquote(parts.fragment) not in pages[target].anchors | {"__top"}:
                broken.append(f"{path.name}: {link}")
    assert seen > 500
    assert broken == []


def test_nothing_is_loaded_from_another_host(site: Path, pages: dict[Path, Page]) -> None:
    """Neither the pages nor their style sheets refer to a file of another host."""
    loaded = {link for page in pages.values() for link in page.loaded}
    assert any(link.endswith(".js") for link in loaded)
    assert any(link.endswith(".css") for link in loaded)
    assert [link for link in loaded if urlsplit(link).netloc] == []
    sheets = [path.read_text() for path in site.rglob("*.css")]
    assert sheets
    assert not [
        address for sheet in sheets for address in re.findall(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", sheet)
    ]


def test_the_picture_of_the_home_page_is_part_of_it(site: Path) -> None:
    """The figure is an SVG element of the page in the text's colour, with a title and the names of all of its parts."""
    text = (site / "index.html").read_text()
    (picture,) = re.findall(r'<svg[^>]*aria-labelledby="arch-title.*?</svg>', text, re.DOTALL)
    assert 'fill="currentColor"' in picture
    for word in ("Server", "Node 0", "cohort", "Client 3", "shared group", "private group"):
        assert word in picture


def test_no_line_of_a_page_ends_inside_a_number_or_an_option(site: Path) -> None:
    """Spaces of numbers do not break, and options in inline code are whole; blocks of code are as they were written."""
    text = (site / "results" / "hyperfl.html").read_text()
    assert re.search(r"\d\xa0±\xa0\d", text)
    assert re.search(r"\d\xa0%", text)
    assert not re.search(r"\d\s(?=[±%])(?<!\xa0)", re.sub(r"<(head|pre)\b.*?</\1>", "", text, flags=re.DOTALL))
    assert '<span class="whole">--columns</span> fashion-mnist-20' in text
    assert 'class="whole"' not in "".join(re.findall(r"<pre\b.*?</pre>", text, re.DOTALL))


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    """Import the script that writes the generated pages."""
    specification = importlib.util.spec_from_file_location("generate_docs", ROOT / "scripts" / "generate_docs.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_generated_pages_are_those_of_the_code(generator: ModuleType) -> None:
    assert generator.PAGES
    for name, page in generator.PAGES.items():
        assert (DOCS / name).read_text() == page(), f"{name} is old; run `python scripts/generate_docs.py`"


def test_pages_are_wrapped_at_120_characters() -> None:
    """Except for code, tables, pictures, and what is written from the code or from records."""
    kept = re.compile(r"^ *```.*?^ *```|<!-- [\w-]+: generated.*?<!-- end", re.MULTILINE | re.DOTALL)
    checked = 0
    for page in written_pages():
        text = page.read_text()
        for line in [] if "<!-- Generated by " in text else kept.sub("", text).splitlines():
            checked += 1
            assert len(line) <= 120 or re.match(r"\s*\|| {4}|!\[|<", line), f"{page}: {line}"
    assert checked > 1000


def test_no_line_of_a_paragraph_begins_as_a_list_does() -> None:
    """A line such as "0. Then" becomes an item; numbered lists begin with 1 or go on."""
    seen = 0
    for page in written_pages():
        last = -2
        for line in re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL).splitlines():
            if found := re.match(r" *(\d+)\. ", line):
                number, seen = int(found[1]), seen + 1
                assert number in (1, last + 1), f"{page}: {line}"
                last = number
            elif line.startswith("#"):
                last = -2
    assert seen > 20


def test_the_page_of_commands_has_every_option(generator: ModuleType) -> None:
    text = generator.commands_page()
    for command in ("run", "study", "audit", "deploy init", "export", "predict"):
        assert f"\n## hyperfl {command}\n" in text
    assert "`--num-rounds INTEGER`\n:   Number of federated rounds.\n" in text
    assert "`FOLDER`\n:   Folder of the run, or on a node the node's folder or state-dir. Required.\n" in text
    assert "`[RUN_DIRECTORY]`\n:   Folder of a run whose settings are taken; it is not changed.\n" in text
    assert not re.search(r"^:   *(Required\.)?$", text, flags=re.MULTILINE)  # each argument and option is explained


def anchors_of(page: Path) -> set[str]:
    """Return the anchors of a Markdown page's headings, without lines in code blocks."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {slugify(heading.replace("`", ""), "-") for heading in headings}


def test_pages_beside_the_site_link_to_what_exists() -> None:
    files = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    links = [(file, link) for file in files for link in re.findall(r"\]\(([^)]+)\)", file.read_text())]
    links = [(file, link) for file, link in links if not urlsplit(link).scheme]
    assert len(links) > 10
    for file, link in links:
        parts = urlsplit(link)
        target = ROOT / parts.path if parts.path else file
        assert target.exists(), f"{file.name} links to {link}"
        if parts.fragment:
            assert parts.fragment in anchors_of(target), f"{file.name} links to {link}"


def test_every_page_that_code_names_exists() -> None:
    """A page that a docstring, comment or message names by its path from the root must exist."""
    folders = ("hyperfl_flwr", "clients", "strategies", "experiments", "benchmarks", "tests", "scripts")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".toml")]
    files += [ROOT / name for name in ("pyproject.toml", "CONTRIBUTING.md", "CHANGELOG.md", "Makefile")]
    named = {(name, path.name) for path in files for name in re.findall(r"docs/[\w/-]+\.md", path.read_text())}
    assert len(named) > 10
    named = {(name, file) for name, file in named if "NAME" not in name}
    assert {(name, file) for name, file in named if not (ROOT / name).is_file()} == set()


def test_every_file_that_a_page_names_exists() -> None:
    """NAME stands for any name; the tutorial adds files of the method `clipped`."""
    pages = [*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    path = r"(?<![\w/.:-])((?:hyperfl_flwr|strategies|clients|experiments|tests|scripts|benchmarks)/[\w/.-]+\w)"
    named = {(name, page.name) for page in pages for name in re.findall(path, page.read_text())}
    assert len(named) > 20
    added = ("NAME", "clipped.py")
    missing = {(name, page) for name, page in named if not (ROOT / name).exists()}
    assert {(name, page) for name, page in missing if not any(part in name for part in added)} == set()
