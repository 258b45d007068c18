"""Networks that a malicious server could send, to measure which of them a node's checks notice.

Each function changes the `cnn` target in place, as a forger does who knows samples of the same kind, but not the
client's. `attack` sends what the audit's malicious server sends. The others have the form of published attacks,
weakened to go around the checks; nothing here recovers samples with them. `hyperfl_flwr.privacy.received_network` names
the papers.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from hyperfl_flwr.app.client import app
from hyperfl_flwr.app.methods import new_strategy
from hyperfl_flwr.app.resolved import resolved
from hyperfl_flwr.attacks.readout import target_names
from hyperfl_flwr.attacks.registry import ATTACKS
from hyperfl_flwr.audit.forged_round import forging, public_images
from hyperfl_flwr.audit.record_round import EXPERIMENT, AttackedRound
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.config.table import default_settings
from hyperfl_flwr.models.target import Target
from hyperfl_flwr.server.federation import handshake
from hyperfl_flwr.server.in_process_grid import InProcessGrid

Forgery = Callable[[Target, Tensor, torch.Generator], None]
"""Changes a network, given samples [n, C, H, W] that the forger knows and random numbers."""


def _config(method: str) -> RunConfig:
    settings = default_settings(method) | {"dataset": "digits", "num-clients": 5, "method": method}
    return resolved(RunConfig.from_flat(settings))


@torch.no_grad()
def generate(network: Target, method: str) -> None:
    """Load into a network what the server of a method generates for client 0 of five on digits in the first round."""
    config = _config(method)
    grid = InProcessGrid(app, 1, config.flat(), {"simulated": True})
    federation = handshake(grid, config.hosted_clients, config.node_timeout)
    strategy = new_strategy(config, federation, experiment=EXPERIMENT, run_directory="")
    received = strategy.per_client_arrays([0])[0]
    named = {name: torch.from_numpy(received[key]) for key, name in target_names(received).items()}
    network.load_state_dict(named)


@torch.no_grad()
def attack(network: Target, known: Tensor, rng: torch.Generator, *, name: str, method: str = "fedavg") -> None:
    """Forge the network of client 0 of five on digits as `hyperfl audit --malicious-server`, which has test images.

    Args:
        network: The network.
        known: Not used.
        rng: Not used; the forgery depends on the run's seed only.
        name: The attack, one of `hyperfl_flwr.attacks.registry` that forges.
        method: The method, of which the clients receive whole networks.
    """
    target = AttackedRound(config=_config(method), clients=[0], malicious_server=True)
    forge = forging(target, ATTACKS[name], public_images(target))
    assert forge is not None
    forged = forge({f"model/{key}": value.numpy() for key, value in network.state_dict().items()}, 0)
    for key, value in network.state_dict().items():
        value.copy_(torch.from_numpy(forged[f"model/{key}"]))


@torch.no_grad()
def bins(
    network: Target,
    known: Tensor,
    rng: torch.Generator,
    *,
    directions: int = 1,
    spread: float = 0.0,
    forged: int | None = None,
) -> None:
    """Let the units of the layer fc divide what lies before it into bins (Fowl et al., ICLR 2022, section 3).

    Args:
        network: The network.
        known: Samples that the forger knows.
        rng: Random numbers.
        directions: Number of directions; each has the same number of bins.
        spread: Norm of a random vector of each row's own, as a multiple of the direction's; 0: rows are parallel.
        forged: Number of units that are forged; None for all.
    """
    layer, inputs = _layer(network), _inputs(network, known)
    units, size = forged or len(layer.weight), layer.weight.shape[1]
    along = _unit(torch.randn(directions, size, generator=rng)).repeat_interleave(units // directions, 0)
    turned = _unit(along + spread * _unit(torch.randn(units, size, generator=rng)))
    rows = turned * layer.weight.norm() / len(layer.weight) ** 0.5  # the layer keeps its norm
    level = (torch.arange(units) % (units // directions) + 0.5) / (units // directions)
    values = inputs @ rows.T
    layer.bias[:units] = -torch.stack([values[:, unit].quantile(level[unit]) for unit in range(units)])
    layer.weight[:units] = rows


@torch.no_grad()
def traps(network: Target, known: Tensor, rng: torch.Generator, *, rate: float = 0.02) -> None:
    """Scale the negative half of each row of fc until a share `rate` of the known samples makes a unit active.

    Boenisch et al., EuroS&P 2023, section 5.2.
    """
    layer, inputs = _layer(network), _inputs(network, known)
    units, size = layer.weight.shape
    values = torch.randn(units, size, generator=rng).abs() / size**0.5
    negative = torch.rand(units, size, generator=rng).argsort(dim=1) < size // 2
    low, high = 0.0, 1e3
    for _ in range(50):
        factor = (low + high) / 2
        rows = torch.where(negative, -factor * values, values)
        is_rarer = float(((inputs @ rows.T) > 0).float().mean()) < rate
        low, high = (low, factor) if is_rarer else (factor, high)
    layer.weight.copy_(rows)
    layer.bias.zero_()


@torch.no_grad()
def dead(network: Target, known: Tensor, rng: torch.Generator) -> None:
    """Let no unit of fc be active (Pasquini et al., CCS 2022, section 4); the biases have the size of the inputs."""
    layer = _layer(network)
    layer.bias.copy_(-2 * (_inputs(network, known) @ layer.weight.T).abs().amax(dim=0))


@torch.no_grad()
def one_class(network: Target, known: Tensor, rng: torch.Generator, *, logit: float) -> None:
    """Add a number to the logit of class 0 (Wen et al., ICML 2022, section 3.2)."""
    network.classifier.bias[0] += logit


def _layer(network: Target) -> nn.Linear:
    """Return the layer fc, the last one of the extractor."""
    layer = network.extractor.get_submodule("fc")
    assert isinstance(layer, nn.Linear)
    return layer


def _inputs(network: Target, known: Tensor) -> Tensor:
    """Return the inputs [n, D] of the layer fc."""
    found: list[Tensor] = []
    hook = _layer(network).register_forward_hook(lambda _module, inputs, _output: found.append(inputs[0]))
    network.extractor(known)
    hook.remove()
    return found[0]


def _unit(rows: Tensor) -> Tensor:
    norms: Tensor = rows.norm(dim=1, keepdim=True)
    return rows / norms


GENERATING = "pfedhn"
"""A method whose server generates each client's network."""

FORGING = [name for name, row in ATTACKS.items() if row.forge is not None]
"""Names of the attacks in which the server forges."""

FORGERIES: Mapping[str, Forgery] = {
    **{f"`{name}`": partial(attack, name=name) for name in FORGING},
    "bins, rows turned by up to 11 degrees": partial(bins, spread=0.2),
    "bins in 8 directions": partial(bins, directions=8),
    "bins in 8 directions, rows turned": partial(bins, directions=8, spread=0.2),
    "bins in 48 of 128 units": partial(bins, forged=48),
    "trap weights, 2 % of the samples": traps,
    "trap weights, 10 % of the samples": partial(traps, rate=0.1),
    "dead layer": dead,
    "one class, logit + 4": partial(one_class, logit=4.0),
}
"""Forged networks by description; those of the audit's attacks by the attack's name."""

OF_GENERATED: Mapping[str, Forgery] = {
    f"`{name}`, generated by `{GENERATING}`": partial(attack, name=name, method=GENERATING) for name in FORGING
}
"""The audit's attacks on a network that the server of `GENERATING` generates for each client."""
