"""docs/results/what-holds.md gives a verdict on each claim, and names studies and tests that exist."""

import re

import pytest

from experiments.study import study_names
from hyperfl_flwr import ROOT

PAGE = (ROOT / "docs" / "results" / "what-holds.md").read_text()
ROWS = [
    line.strip("| ").split(" | ")
    for line in PAGE.splitlines()
    if line.startswith("| ") and line.count(" | ") > 1 and not line.startswith("| claim |")
]
PLACE = re.compile(r"\(.*\b([Tt]able|[Ff]igure|[Ss]ection|Theorem|Remark|Assumption|[Aa]ppendix).*\)$")
VERDICTS = ("holds", "under conditions", "does not hold", "not tested")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:60])
def test_a_claim_has_its_place_a_verdict_a_number_and_a_test(row: list[str]) -> None:
    assert len(row) == 4
    claim, verdict, found, test = row
    assert PLACE.search(claim)
    assert verdict.startswith(tuple(f"**{name}**" for name in VERDICTS))
    if found == "nothing yet":
        assert verdict.startswith("**not tested**: ")
    else:
        assert found
        assert "[" in test or "`" in test


def test_the_page_names_what_exists() -> None:
    assert len(ROWS) > 30
    tested = " ".join(row[3] for row in ROWS)
    named = set(re.findall(r"`([a-z][a-z0-9-]*)`", tested)) - {"generator-dlg"}
    assert named <= set(study_names())
    for path in re.findall(r"(tests/[\w/]+\.py)", tested):
        assert (ROOT / path).is_file()
