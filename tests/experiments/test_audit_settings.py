"""Settings that an audit replaces: they are not refused before it, and what was given is not ignored in silence."""

from pathlib import Path

import pytest
from federations import Call

from hyperfl_flwr.audit.make_round import _attacked, _fresh, make_attacked_round
from hyperfl_flwr.audit.options import Options
from hyperfl_flwr.audit.replaced import REPLACED, SECTIONS, without_replaced
from hyperfl_flwr.config.table import default_settings
from hyperfl_flwr.launch.early_check import check_early


def test_settings_that_an_audit_replaces_are_not_refused_before_it() -> None:
    """The list of the early check has exactly what `make_attacked_round` replaces."""
    given = {
        "keep": "best",
        "early-stopping": 3,
        "data.global-test": True,
        "output": "runs/mine",
        "adversary.share": 0.5,
    }
    settings = default_settings() | {"method": "fedavg"} | given
    check_early(without_replaced({"method": "fedavg", **given}))
    assert make_attacked_round(settings, Options(attacks=["ig"], num_images=2, samples=1)).config.keep == "last"
    attacked = _attacked(settings, 2, 1, opened=False)
    replaced = {*attacked, *_fresh(settings, 2, attacked)} - {"secagg.enabled"}
    assert {key for key in replaced if key.partition(".")[0] not in SECTIONS} == REPLACED
    assert {key.partition(".")[0] for key in replaced} >= set(SECTIONS)


@pytest.mark.parametrize(
    ("given", "ignored"),
    [
        ({"data.partition": "dirichlet", "data.validation-fraction": 2, "momentum": 0.5}, True),
        ({"num-clients": 1, "momentum": 0.5}, False),
        ({}, False),
    ],
)
def test_given_settings_that_an_audit_ignores_are_named(
    given: dict[str, float | str], ignored: bool, call: Call, tmp_path: Path
) -> None:
    words = [f"--set={key}={value}" for key, value in {"target": "mlp", **given}.items()]
    code, _, text = call("audit", "--method", "fedavg", "--dataset", "digits", "--num-images", "1", "--attacks", "idlg",
                         "--output", tmp_path / "audit", *words)  # fmt: skip
    assert code == 0, text
    line = "warning: the audit chooses data.partition, data.validation-fraction itself and ignores what was given"
    assert (line in text) == ("warning: the audit chooses" in text) == ignored
