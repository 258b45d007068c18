"""The attacks that apply to each method. The tables are written by hand; the code derives them from declarations."""

import contextlib
from collections.abc import Sequence
from typing import Any

import pytest

from hyperfl_flwr.app.resolved import resolved
from hyperfl_flwr.audit.chosen import chosen_attacks
from hyperfl_flwr.audit.record_round import AttackedRound
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.config.table import default_settings
from hyperfl_flwr.core.errors import ConfigError

FIRST_ROUND = 1

ON_UPLOADS: dict[str, Sequence[str]] = {
    "local": (),
    "fedavg": ("ig", "head-gradient", "idlg", "rog", "dlg"),
    "ditto": ("ig", "head-gradient", "idlg", "rog", "dlg"),
    "fedala": ("ig", "head-gradient", "idlg", "rog", "dlg"),
    "apfl": ("ig", "head-gradient", "idlg", "rog", "dlg"),
    "fedper": ("head-gradient", "rog"),
    "lg-fedavg": ("idlg",),
    "fedbn": ("idlg",),
    "ppsgd": ("ig", "head-gradient", "idlg", "rog", "dlg"),
    "fedrep": ("head-gradient", "rog"),
    "hyperfl": ("ig-paper", "head-gradient", "rog", "rog-paper", "tailored"),
    "hyperfl-frozen": ("head-gradient", "rog"),
    "pfedhn": ("ig", "head-gradient", "idlg", "rog", "dlg"),
    "pfedhn-pc": ("head-gradient", "rog"),
    "it-pfl": ("ig", "head-gradient", "idlg", "rog", "dlg", "encoder-gradient"),
    "priv-hfl": ("dual-difference",),
}

ON_SUMS: dict[str, Sequence[str]] = {
    "local": (),
    "fedavg": ("head-gradient",),
    "ditto": ("head-gradient",),
    "fedala": ("head-gradient",),
    "apfl": ("head-gradient",),
    "fedper": ("head-gradient",),
    "lg-fedavg": (),
    "fedbn": (),
    "ppsgd": ("head-gradient",),
    "fedrep": ("head-gradient",),
    "hyperfl": ("head-gradient", "channels-known", "channels-ica"),
    "hyperfl-frozen": ("head-gradient",),
    "pfedhn": (),
    "pfedhn-pc": (),
    "it-pfl": (),
    "priv-hfl": (),
}


def applicable(
    method: str, *, server_round: int = FIRST_ROUND, summed: bool = False, prior: str = "", **changes: Any
) -> Sequence[str]:
    """Return the attacks that an audit runs by default; keys of `changes` have `_` for `-` and `__` for dots."""
    settings = {key.replace("__", ".").replace("_", "-"): value for key, value in changes.items()}
    config = resolved(RunConfig.from_flat(default_settings() | {"method": method} | settings))
    by_neighbours = config.flat()["priv-hfl.realisation"] == "chain"
    target = AttackedRound(
        config=config, clients=[0], recorded_round=server_round, summed=summed, by_neighbours=by_neighbours,
        prior=prior,
    )  # fmt: skip
    with contextlib.suppress(ConfigError):  # no attack applies
        return tuple(chosen_attacks((), target))
    with pytest.raises(ConfigError, match="no attack of this project applies"):
        chosen_attacks((), target)
    return ()


@pytest.mark.parametrize(("method", "attacks"), ON_UPLOADS.items())
def test_attacks_on_single_uploads(method: str, attacks: Sequence[str]) -> None:
    assert applicable(method) == attacks


@pytest.mark.parametrize(("method", "attacks"), ON_SUMS.items())
def test_attacks_on_sums(method: str, attacks: Sequence[str]) -> None:
    assert applicable(method, summed=True) == attacks


def test_a_generator_is_attacked_where_there_is_one() -> None:
    assert applicable("priv-hfl", priv_hfl__distill=True) == ("dual-difference", "generator-dlg")
    assert applicable("fedavg", priv_hfl__distill=True) == ON_UPLOADS["fedavg"]


def test_an_encoder_is_attacked_while_it_is_trained() -> None:
    """The encoder is attacked in round 2 of 3, but not in round 3, which tunes the hypernetwork only."""
    changes = {"num_rounds": 3, "it_pfl__fine_tune_rounds": 1}
    assert applicable("it-pfl", server_round=2, **changes) == ON_UPLOADS["it-pfl"]
    assert applicable("it-pfl", server_round=3, **changes) == ON_UPLOADS["fedavg"]
    assert applicable("fedavg", server_round=3, **changes) == ON_UPLOADS["fedavg"]


def test_neighbours_in_a_chain_follow_models() -> None:
    assert applicable("priv-hfl", priv_hfl__realisation="chain") == ("dual-difference",)


def test_a_prior_adds_the_attack_that_needs_it() -> None:
    assert applicable("fedavg", prior="mnist") == ("ig", "head-gradient", "idlg", "rog", "dlg", "ig-prior")
    assert "ig-prior" not in applicable("fedavg")


def test_networks_without_a_last_linear_layer_are_attacked_where_the_classifier_is_shared() -> None:
    assert applicable("fedavg", target="resnet18") == ("ig", "idlg", "rog", "dlg")
    assert applicable("fedrep", target="resnet18") == ()
