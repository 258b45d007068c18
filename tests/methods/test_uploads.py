"""The uploads that a method declares are those its clients send."""

from pathlib import Path

import numpy as np
import pytest

from hyperfl_flwr.app.methods import client_of, strategy_of
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.config.table import all_settings, training_autos
from hyperfl_flwr.contract.base import SMALL, Federate
from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.core.settings import declared
from hyperfl_flwr.methods import METHODS
from hyperfl_flwr.protocol.messages import Reduction, group_of
from hyperfl_flwr.runs.observation import load_observation, observation_path
from hyperfl_flwr.runs.run_directory import settings_of

GROUPS = {"kept-model": ("changes", "force")}
"""Shared groups that contain a part of another name; one of these is empty."""

BESIDES = ("embedding", "knowledge", "labels", "classifier")
"""Shared groups without a part of their own: no parameters, or parameters that another group holds, too."""

of_each = pytest.mark.parametrize("method", METHODS)


@of_each
def test_a_row_names_the_shared_groups(method: str) -> None:
    row, client = METHODS[method], client_of(method)
    named = [group for upload in row.uploads for group in GROUPS.get(upload.part, (upload.part,))]
    sent = {group for group, reduction in client.shared.items() if reduction is not Reduction.DOWN}
    assert sorted([*named, *(set(BESIDES) & sent - set(named))]) == sorted(sent)
    for upload in row.uploads:
        if upload.part in client.shared:
            assert upload.separate_start == (client.shared[upload.part] == Reduction.PER_CLIENT)


@pytest.mark.parametrize("method", [name for name, row in METHODS.items() if row.uploads])
def test_a_row_says_in_what_form_they_are_sent(method: str, federate: Federate) -> None:
    """Parameters are close to those received, changes are small, and nothing else is sent."""
    run: Path = federate(method, num_rounds=2, num_clients=2, **{"audit.clients": "0", "audit.rounds": "1"})
    config = RunConfig.from_flat(settings_of(run))
    sent = {upload.part: upload for upload in METHODS[method].active_uploads(config, 1)}
    seen = load_observation(observation_path(run, 1, 0))
    assert {group_of(key) for key in seen.reply} - set(BESIDES) <= {
        group for part in sent for group in GROUPS.get(part, (part,))
    }
    for part, upload in sent.items():
        for group in GROUPS.get(part, (part,)):
            keys = [key for key in seen.reply if group_of(key) == group]
            if not keys or part == "kept-model":  # its start is not sent
                continue
            before, reply = (
                np.concatenate([np.ravel(each[key]) for key in keys]) for each in (seen.received, seen.reply)
            )
            if METHODS[method].weight_epsilon:  # the noise is as large as the parameters
                continue
            is_near = np.linalg.norm(reply - before) < np.linalg.norm(reply)
            assert is_near == (upload.form == "values"), (part, upload.form)


def test_a_method_without_uploads_cannot_be_recorded(federate: Federate, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"audit\.clients must be empty with local, got 0"):
        federate("local", num_rounds=1, **{"audit.clients": "0", "audit.rounds": "1"})
    assert not list(tmp_path.iterdir())


@of_each
def test_every_auto_of_its_settings_becomes_a_number(method: str) -> None:
    config = RunConfig.from_flat({key: each.default for key, each in all_settings().items()} | {"method": method})
    config = RunConfig.from_flat(config.flat() | {"learning-rate": METHODS[method].learning_rate})
    autos = {each.key for section in METHODS[method].settings for each in declared(section) if each.is_auto}
    assert autos <= strategy_of(method).automatic(config).keys() <= training_autos()


@of_each
def test_its_small_form_is_of_its_settings(method: str) -> None:
    """All settings in `SMALL` exist, and the module named after the method holds its row."""
    assert SMALL.keys() <= all_settings().keys()
    module = method.replace("-", "_")
    assert METHODS[method] is __import__(f"hyperfl_flwr.methods.{module}", fromlist=["METHOD"]).METHOD
