"""Rules for every page: foreign text is escaped, both themes are legible, and figures follow the theme."""

import json
import re
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from federations import Call
from html_pages import Page

from hyperfl_flwr.audit.audit import audit
from hyperfl_flwr.audit.make_round import make_attacked_round
from hyperfl_flwr.audit.options import Options
from hyperfl_flwr.audit.report import write_audit
from hyperfl_flwr.config.table import default_settings
from hyperfl_flwr.contract.base import SMALL, Federate
from hyperfl_flwr.data.registry import load_dataset
from hyperfl_flwr.node.ledger import ArrayEntry, Ledger, LedgerEntry, RecordEntry
from hyperfl_flwr.pages.render import NOTHING, TEMPLATES, moment
from hyperfl_flwr.protocol.messages import Failure
from hyperfl_flwr.results.report import write_report
from hyperfl_flwr.runs.run_directory import RunDirectory

SCRIPT = "<script>alert('1')</script>"
ESCAPED = "&lt;script&gt;alert(&#39;1&#39;)&lt;/script&gt;"
BACKWARDS = "\u202e"
"""Character that makes the text after it run from right to left."""


@pytest.fixture
def named_badly(tmp_path: Path) -> str:
    """Return a data set whose file name contains a tag; a slash cannot be in a file's name."""
    digits = load_dataset("digits").train
    file = tmp_path / "<script>$\\frac$.npz"
    np.savez(file, images=digits.images[:300], labels=digits.labels[:300])
    return f"npz:{file}"


def test_times_of_a_page_are_in_utc() -> None:
    assert moment("2026-11-30T00:49:40+0200") == "2026-11-29 22:49:40 UTC"
    assert moment(None) == NOTHING


def test_a_run_s_page_escapes_settings_reasons_and_nodes(federate: Federate, named_badly: str) -> None:
    """Its figures can be drawn, too: dollar signs in a name are not a formula."""
    run = federate("fedavg", dataset=named_badly, plots=True)
    directory = RunDirectory(run)
    directory.write_failures("round-000001", [Failure(client=1, reason=f"{SCRIPT}{BACKWARDS}", details="")])
    directory.close()
    manifest = json.loads((run / "manifest.json").read_text())
    excluded = {"node": 1, "round": 1, "until": 2, "times": 1, "reason": SCRIPT}
    manifest |= {"problem": SCRIPT, "devices": [SCRIPT, "cpu"], "excluded": [excluded]}
    manifest["settings"]["personalize.run"] = f"/{SCRIPT}"
    manifest["versions"]["flwr"] = SCRIPT
    (run / "manifest.json").write_text(json.dumps(manifest))
    text = write_report(run).read_text()
    page = Page(text)
    assert "<script" not in text
    assert text.count(ESCAPED) == 6
    assert BACKWARDS not in text
    assert page.title == "fedavg on <script>$\\frac$.npz, 10 classes, 1x8x8"
    assert page.rows["dataset"] == [named_badly, "digits"]


def test_an_audit_s_page_escapes_settings(tmp_path: Path, named_badly: str) -> None:
    changes = {"dataset": named_badly, "method": "fedavg", "num-clients": 2, "batch-size": 1, "local-epochs": 1}
    options = Options(attacks=["ig", "idlg"], num_images=2, iterations=2)
    target = make_attacked_round(default_settings() | SMALL | changes, options)
    write_audit(target, audit(target, options), tmp_path)
    text = (tmp_path / "audit.html").read_text()
    page = Page(text)
    assert "<script" not in text
    assert page.title == "fedavg on <script>$\\frac$.npz: one step on 1 image"
    assert page.rows["dataset"] == [named_badly, "digits"]
    assert len(page.sources) == 6  # for each of two images: private, rebuilt, unrelated
    assert 'alt="reconstruction of private image 2 by ig, PSNR' in text


def test_a_ledger_s_page_escapes_what_a_server_has_chosen(tmp_path: Path, call: Call) -> None:
    array = ArrayEntry(name=f"{SCRIPT}/weight", shape=[2], dtype=SCRIPT, bytes=8)
    records = [
        RecordEntry(name=SCRIPT, bytes=20, arrays=[array]), RecordEntry(name="x", bytes=5, values={"key": SCRIPT}),
    ]  # fmt: skip
    entry = LedgerEntry(
        time=datetime.now(UTC).isoformat(), direction="out", kind=SCRIPT, flower_run=1, node=0, method=SCRIPT,
        experiment=SCRIPT, round=1, records=records, error=SCRIPT,
    )  # fmt: skip
    Ledger(tmp_path / "state").append(entry)
    code, printed, _ = call("ledger", tmp_path / "state")
    assert (code, SCRIPT in "".join(printed.split())) == (0, True)
    file = tmp_path / "ledger.html"
    assert call("ledger", tmp_path / "state", "--output", file) == (0, f"{file}\n", "")
    text = file.read_text()
    Page(text)
    assert "<script" not in text
    assert text.count("&lt;script&gt;alert(&#39;1&#39;)") >= 7


def test_a_ledger_s_page_says_what_the_command_prints(federate: Federate, tmp_path: Path, call: Call) -> None:
    """Sizes are equal, private groups stayed, and only the owner can read the page."""
    run = federate("hyperfl", ledger=True)
    code, text, _ = call("ledger", run, "--json")
    (document,) = json.loads(text)
    page = tmp_path / "ledger.html"
    assert (code, call("ledger", run, "--received", "--output", page)) == (0, (0, f"{page}\n", ""))
    assert page.stat().st_mode & 0o777 == 0o600
    text = page.read_text()
    rows = Page(text).rows
    for name, sizes in document["totals"].items():
        assert rows[name] == [f"{sizes['out']:,}", f"{sizes['in']:,}"]
    assert "<strong>All private groups stayed on the node</strong> classifier, embedding" in text
    passed = [message["direction"] for message in document["messages"]]
    assert [text.count(f"<li>{way}: ") for way in ("sent", "received")] == [passed.count("out"), passed.count("in")]
    code, _, problem = call("ledger", run, "--json", "--output", page)
    assert code == 2
    assert "--json prints and --output writes a page" in problem


def themes() -> dict[str, dict[str, str]]:
    """Return the colours of the light and the dark theme, by variable."""
    light, dark = (TEMPLATES / "page.css").read_text().split("@media (prefers-color-scheme: dark)")
    return {
        name: dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6})", text))
        for name, text in (("light", light), ("dark", dark))
    }


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colours, from 1 to 21 (WCAG 2.2, relative luminance)."""

    def luminance(colour: str) -> float:
        parts = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_texts_and_curves_stand_out_in_both_themes(theme: str) -> None:
    """The contrast is at least WCAG's 4.5 for text and 3 for graphics."""
    found = themes()[theme]
    assert set(found) == set(themes()["light"])
    for text in ("ink", "muted"):
        assert contrast(found[text], found["paper"]) >= 4.5
        assert contrast(found[text], found["panel"]) >= 4.5
    for notice in ("alarm", "calm"):
        assert contrast(found[notice], found[f"{notice}-panel"]) >= 4.5
        assert contrast(found["ink"], found[f"{notice}-panel"]) >= 4.5
    assert min(contrast(found[colour], found["paper"]) for colour in ("blue", "vermillion")) >= 3


def test_figures_have_the_colours_of_the_theme_alone(federate: Federate) -> None:
    """Every colour of a figure is a variable of the style sheet, so that no theme hides it."""
    text = write_report(federate("fedavg")).read_text()
    figures = re.findall(r"<svg .*?</svg>", text, re.DOTALL)
    assert len(figures) == 5
    for figure in figures:
        assert re.findall(r"(?:fill|stroke): (#[0-9a-f]+)", figure) == []
        assert {"ink", "blue"} <= set(re.findall(r"var\(--([a-z]+)\)", figure)) <= set(themes()["light"])
