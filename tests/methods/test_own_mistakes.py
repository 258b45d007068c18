"""Mistakes in a method of the user's own end with what is wrong, where, and what to do."""

import json
import re

import pytest

from hyperfl_flwr.app.resolved import resolved
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.config.table import with_defaults
from hyperfl_flwr.contract.base import Federate
from hyperfl_flwr.core.errors import ConfigError, RunFailedError

pytestmark = pytest.mark.usefixtures("imports_as_before")

RETURNED = (
    "must return a dictionary with an array for each key of `means`, got None",
    "returned no model/classifier.bias; return an array for each key of `means`",
    "returned model/classifier.bais, which clients do not receive; leave it out; did you mean model/classifier.bias?",
    "with the type float64, expected float32 as in `means`; convert it",
    "with the shape (144,), expected (16, 1, 3, 3) as in `means`; convert it",
)


@pytest.mark.parametrize("number", range(len(RETURNED)))
def test_what_a_strategy_returns_is_checked_where_it_returns_it(number: int, federate: Federate) -> None:
    with pytest.raises(RunFailedError, match=rf"^Mistaken\.advance .*{re.escape(RETURNED[number])}"):
        federate("broken_methods:MISTAKEN", seed=number)


CLIENTS = {
    "MISNAMING": r"Misnaming.private names the group haed, but build_groups returned model",
    "ONE_NAME": r'OneName.private must be a tuple of names, got a text; write \("head",\)',
    "NOTHING_RETURNED": r"NothingReturned.train must return a dictionary of numbers to report, got None; return that",
    "VECTORS": r"Vectors.train must return a number for norms, got a Tensor; leave it out or convert it",
}


@pytest.mark.parametrize("name", CLIENTS)
def test_a_mistake_in_a_client_is_the_reason_why_it_is_left_out(name: str, federate: Federate) -> None:
    with pytest.raises(RunFailedError, match=CLIENTS[name]):
        federate(f"broken_methods:{name}")


def test_scalars_of_numpy_and_torch_are_reported(federate: Federate) -> None:
    """They were left out without a word before."""
    lines = [
        json.loads(line) for line in (federate("broken_methods:SCALARS") / "metrics.jsonl").read_text().splitlines()
    ]
    trained = next(line for line in lines if line["kind"] == "train")
    assert (trained["of_torch"], trained["of_numpy"]) == (2.0, 0.5)


def test_a_number_for_an_unknown_setting_is_refused() -> None:
    config = RunConfig.from_flat(with_defaults({"method": "broken_methods:UNKNOWN_SETTING"}))
    expected = r"UnknownSetting.automatic returns clipped.server-shar, which is no setting; did you mean clipped"
    with pytest.raises(ConfigError, match=expected):
        resolved(config)
