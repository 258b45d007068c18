"""Choose the attacks of an audit: all that apply to what the server sees of a method, or those that were named."""

from collections.abc import Collection, Mapping, Sequence

from hyperfl_flwr.attacks.registry import ATTACKS, FORGED, Attack, attacks_on
from hyperfl_flwr.audit.record_round import AttackedRound
from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.core.method import Part, Upload
from hyperfl_flwr.core.similar_names import nearest
from hyperfl_flwr.methods import METHODS


def chosen_attacks(names: Sequence[str], target: AttackedRound) -> list[str]:
    """Return the names of the attacks to run; by default all that apply to what the server sees of the method.

    Raises:
        ConfigError: If one is unknown or does not apply.
    """
    uploads = METHODS[target.config.method].active_uploads(target.config, target.round)
    possible = [
        name
        for name in attacks_on(uploads, summed=target.summed, malicious_server=target.malicious_server)
        if target.allows(ATTACKS[name])
    ]
    for name in names:
        _check_named(name, possible, uploads, target)
    parts = {upload.part for upload in uploads}
    unfit = {name: reason for name in possible if (reason := _unfit(ATTACKS[name], target, parts))}
    for name in names:
        if name in unfit:
            raise ConfigError(f"{name} does not apply to target = {target.config.target}: {unfit[name]}")
    fit = [name for name in possible if name not in unfit]
    if not fit:
        raise ConfigError(_none_left(uploads, unfit, target))
    chosen = list(names) or fit
    _check_prior(chosen, target)
    return chosen


def _check_named(name: str, possible: Collection[str], uploads: Sequence[Upload], target: AttackedRound) -> None:
    """Check that an attack exists and is one on this kind of server and on what it sees.

    Args:
        name: The attack that was named.
        possible: Names of the attacks on what the server sees; if there are none, `_none_left` says why.
        uploads: What the clients upload.
        target: The attacked round.
    """
    if name not in ATTACKS:
        raise ConfigError(f"there is no attack {name!r}; known: {', '.join(ATTACKS)}{nearest(name, ATTACKS)}")
    if ATTACKS[name].needs_prior and not target.prior:
        raise ConfigError(f"{name} needs public images of another data set: name it with --prior")
    if (ATTACKS[name].forge is not None) != target.malicious_server:
        follows, is_malicious = (
            "follows the protocol; leave --malicious-server out",
            "is malicious; give --malicious-server",
        )
        server = follows if target.malicious_server else is_malicious
        raise ConfigError(f"the attack {name} assumes that the server {server}")
    if possible and name not in possible:
        raise ConfigError(f"{name} does not apply to {_attacked(uploads, target)}; what does: {', '.join(possible)}")


def _none_left(uploads: Sequence[Upload], unfit: Mapping[str, str], target: AttackedRound) -> str:
    """Return the message for a round to which no attack applies; `unfit` are the attacks' reasons by name."""
    if target.malicious_server:
        reason = _unforged(uploads, unfit, summed=target.summed)
        return (
            f"no attack of a malicious server applies to {_attacked(uploads, target)} with target = "
            f"{target.config.target}: {reason}; leave --malicious-server out for the attacks of a curious server"
        )
    return f"no attack of this project applies to {_attacked(uploads, target)}, which is no proof of safety"


def _attacked(uploads: Sequence[Upload], target: AttackedRound) -> str:
    """Return what is attacked: a method or the sum of its uploads, and what it does not send in this round."""
    method = f"the sum of uploads of {target.config.method}" if target.summed else target.config.method
    missing = [upload.part for upload in METHODS[target.config.method].uploads if upload not in uploads]
    if missing and not target.malicious_server:  # a malicious server forges none of these parts
        return f"{method}, which sends no {' and no '.join(missing)} in round {target.round}"
    return method


def _check_prior(chosen: Sequence[str], target: AttackedRound) -> None:
    """Check that the prior is of another data set than the attacked one, and that one of the attacks needs it."""
    if target.prior == target.config.dataset:
        raise ConfigError(f"the prior must be learned from another data set than the attacked {target.prior}")
    if target.prior and not any(ATTACKS[name].needs_prior for name in chosen):
        users = ", ".join(name for name, attack in ATTACKS.items() if attack.needs_prior)
        raise ConfigError(f"--prior is for {users} only, which is not among the attacks; leave it out")


_UNFORGED: Mapping[Part, str] = {
    "kept-model": "its server sends no network, since each client trains a model that it keeps",
    "layers": "its networks have normalisation layers, which no such attack can forge",
    "classifier": "its clients keep the first fully connected layer, of which such attacks read the images",
}
"""Why a malicious server can forge nothing, by what the clients upload."""


def _unforged(uploads: Sequence[Upload], unfit: Mapping[str, str], *, summed: bool) -> str:
    """Return why a malicious server can forge nothing: what it sends, or the attacks' reasons by name."""
    if unfit:
        return "; ".join(f"{name}: {reason}" for name, reason in unfit.items())
    if summed and any(upload.part in FORGED for upload in uploads):
        return "each client starts from a network of its own, and the server sees single uploads"
    reasons = [_UNFORGED[upload.part] for upload in uploads if upload.part in _UNFORGED]
    return reasons[0] if reasons else f"its server sends none of what they forge ({', '.join(FORGED)})"


def _unfit(attack: Attack, target: AttackedRound, parts: Collection[Part]) -> str:
    """Return why an attack cannot use the clients' networks, of which these parts are sent; empty if it can."""
    if attack.check is None or attack.check_without in parts:
        return ""
    try:
        for client in target.clients[: len(target.config.targets)]:
            attack.check(target.knowledge(client))
    except ValueError as error:
        return str(error)
    return ""
