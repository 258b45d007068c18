"""A warning where the models are no better than always saying the most common class."""

import json

from federations import Federate

from hyperfl_flwr.results.compare import compare
from hyperfl_flwr.results.report import write_report
from hyperfl_flwr.runs.summary import majority_text

TEXT = "the personalized accuracy, 90.00 %, is not above 91.00 %, that of always saying each client's most common class"


def test_the_text() -> None:
    assert majority_text({"test_accuracy": 0.9, "test_majority_share": 0.91}) == TEXT
    assert majority_text({"test_accuracy": 0.91, "test_majority_share": 0.91}) != ""
    assert majority_text({"test_accuracy": 0.92, "test_majority_share": 0.91}) == ""
    assert majority_text({"test_accuracy": 0.9, "test_majority_share": None}) == ""
    assert majority_text({"test_accuracy": None, "test_majority_share": 0.91}) == ""


def test_where_it_is_shown(federate: Federate) -> None:
    """A model that has not learned is warned of in the log, the report and comparisons; another is not."""
    idle, trained = (federate("fedavg", learning_rate=rate) for rate in (1e-9, 0.1))
    for run, warned in ((idle, True), (trained, False)):
        text = majority_text(json.loads((run / "summary.json").read_text()))
        assert bool(text) == warned
        assert ("most common class" in (run / "server.log").read_text()) == warned
        assert ("No better than the most common class" in write_report(run).read_text()) == warned
    assert any(note.startswith(f"{idle.name}: the personalized accuracy") for note in compare([idle, trained]).notes)
