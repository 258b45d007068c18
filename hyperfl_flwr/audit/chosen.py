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
    method = f"the sum of uploads of {target.config.method}" if target.summed else target.config.method
    row = METHODS[target.config.method]
    uploads = row.active_uploads(target.config, target.round)
    possible = [
        name
        for name in attacks_on(uploads, summed=target.summed, malicious_server=target.malicious_server)
        if target.allows(ATTACKS[name])
    ]
    missing = [upload.part for upload in row.uploads if upload not in uploads]
    if missing and not target.malicious_server:  # a malicious server forges none of these parts
        method = f"{method}, which sends no {' and no '.join(missing)} in round {target.round}"
    for name in names:
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
            raise ConfigError(f"{name} does not apply to {method}; what does: {', '.join(possible)}")
    parts = {upload.part for upload in uploads}
    unfit = {name: reason for name in possible if (reason := _unfit(ATTACKS[name], target, parts))}
    for name in names:
        if name in unfit:
            raise ConfigError(f"{name} does not apply to target = {target.config.target}: {unfit[name]}")
    possible = [name for name in possible if name not in unfit]
    if not possible and target.malicious_server:
        reason = _unforged(uploads, unfit, summed=target.summed)
        raise ConfigError(
            f"no attack of a malicious server applies to {method} with target = {target.config.target}: "
            f"{reason}; leave --malicious-server out for the attacks of a curious server"
        )
    if not possible:
        raise ConfigError(f"no attack of this project applies to {method}, which is no proof of safety")
    if target.prior == target.config.dataset:
        raise ConfigError(f"the prior must be learned from another data set than the attacked {target.prior}")
    if target.prior and not any(ATTACKS[name].needs_prior for name in names or possible):
        users = ", ".join(name for name, attack in ATTACKS.items() if attack.needs_prior)
        raise ConfigError(f"--prior is for {users} only, which is not among the attacks; leave it out")
    return list(names) or possible


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
