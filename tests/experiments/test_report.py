"""The page about a run: complete, self-contained, and true."""

import html.parser
import json

import pytest

from hyperfl_flwr.core.errors import RunDirectoryError
from hyperfl_flwr.results.report import write_report


class Page(html.parser.HTMLParser):
    """Collects a page's texts, its rows and its sources; a tag that is not closed is an error."""

    def __init__(self, text):
        super().__init__()
        self.open, self.rows, self.sources, self.bold = [], {}, [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.sources += [values[name] for name in ("src", "href") if name in values]
        if tag not in ("meta", "img"):
            self.open.append(tag)
        if tag == "tr":
            self.cells, self.changed = [], values.get("class") == "changed"
        if tag == "td":
            self.cells.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        if tag == "tr":
            name, value = self.cells
            self.rows[name] = value
            self.bold += [name] * self.changed

    def handle_data(self, data):
        if self.open and self.open[-1] == "td":
            self.cells[-1] += data


@pytest.mark.parametrize("method", ["hyperfl", "pfedhn", "local"])
def test_the_page_says_what_the_run_recorded(federate, method):
    """Numbers are the summary's; three pictures are inside; nothing is loaded from elsewhere."""
    run = federate(method, learning_rate=0.125)
    summary = json.loads((run / "summary.json").read_text())
    file = write_report(run)
    assert file == run / "report.html"
    page = Page(file.read_text())
    assert len(page.sources) == 3
    assert all(source.startswith("data:image/png;base64,") for source in page.sources)
    own = page.rows["own accuracy (after local training), mean over the clients"]
    assert own == f"{100 * summary['test_accuracy']:.2f} %"
    sent = page.rows["a client's payload to the server, per round"]
    assert sent == f"{summary['bytes_up_per_client_round'] / 1e6:.3f} MB"
    assert page.rows["learning-rate"] == "0.125"
    assert {"learning-rate", "num-clients", "output"} <= set(page.bold)
    assert "momentum" not in page.bold
    text = file.read_text()
    assert "The run is complete: 2 rounds, 5 clients on 2 nodes." in text
    assert {"hyperfl": "embedding, classifier", "pfedhn": "model (per_client)", "local": "none"}[method] in text


def test_texts_of_others_are_escaped_and_a_deployment_has_no_label_counts(federate, tmp_path):
    run = federate("fedavg")
    manifest = json.loads((run / "manifest.json").read_text())
    del manifest["label_counts"]
    manifest |= {"status": "failed", "problem": "<script>alert(1)</script>"}
    (run / "manifest.json").write_text(json.dumps(manifest))
    file = write_report(run, tmp_path / "page.html")
    text = file.read_text()
    assert "<script>" not in text
    assert "The run has failed: 2 rounds, 5 clients on 2 nodes. &lt;script&gt;" in text
    page = Page(text)
    assert len(page.sources) == 2
    assert "do not tell their label distributions" in text


def test_a_folder_that_is_no_run(tmp_path):
    with pytest.raises(RunDirectoryError):
        write_report(tmp_path)


def test_the_global_test_set_is_told_where_it_was_asked_for(federate):
    summary = json.loads(((run := federate("fedavg", **{"data.global-test": True})) / "summary.json").read_text())
    rows = Page(write_report(run).read_text()).rows
    assert rows["own accuracy on all test data of the data set"] == f"{100 * summary['global_test_accuracy']:.2f} %"
    plain = Page(write_report(federate("fedavg")).read_text()).rows
    assert "own accuracy on all test data of the data set" not in plain
