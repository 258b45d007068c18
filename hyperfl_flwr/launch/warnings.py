"""Warn before a run starts if its settings are known to leak private images or to spoil it, or have no effect.

The thresholds come from measurements (docs/privacy/threat-model.md, docs/privacy/differential-privacy.md): in a
network with convolutions, attacks on an honest server's view have found images among eight in one step and none among
60 in six steps; in a perceptron, some among 102 of one client in 15 steps, and among the single images of 100 clients
in the sum of one step. The absence of a warning is not a guarantee of privacy.
"""

import math
from collections.abc import Mapping, Sequence

from hyperfl_flwr.attacks.registry import attacks_on
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.config.table import default_settings
from hyperfl_flwr.core.plurals import counted
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.data.federated_data import FederatedData
from hyperfl_flwr.data.partition.registry import EQUAL_SIZES
from hyperfl_flwr.methods import METHODS
from hyperfl_flwr.models.targets import PERCEPTRONS
from hyperfl_flwr.protocol.secure_sums.thresholds import unknown_nodes

FEW_SAMPLES = 8
"""Number of samples up to which images count as open in any network, after any number of steps."""

PERCEPTRON_SAMPLES, PERCEPTRON_STEPS = 100, 15
"""Numbers of samples and of local steps up to which single images are known to be found in a perceptron, in the upload
of one client and in a sum; of 600 samples none was found."""

ENOUGH_NOISE = 0.03
"""Smallest noise multiplier at which they have reconstructed none, with any prior."""

LARGEST_EPSILON = 10.0
"""Largest `dp.epsilon` at which noisy steps count as protection; a larger one adds little noise."""

LARGEST_NOISE = 20.0
"""Largest norm of noise in a mean without a warning, in clipping norms; at 17 received models lost 9 to 13 points."""

PARTITION_SETTINGS: Mapping[str, Sequence[str]] = {
    "data.iid-fraction": ("similarity",),
    "data.dirichlet-alpha": ("dirichlet", "dirichlet-per-label"),
    "data.shards-per-client": ("shards",),
}
"""Settings of single partitions, with the partitions that they are for."""


def partition_warnings(changes: Mapping[str, Scalar], data: FederatedData) -> list[str]:
    """Return a warning for each changed setting that the partition in use ignores.

    Args:
        changes: Settings that the user has given.
        data: The federation's data.
    """
    name, default, found = data.partition, default_settings(), []
    given = changes.get("data.partition", name)
    if given not in (name, default["data.partition"]):
        found.append(
            f"data.partition = {given} has no effect: {data.dataset.name} has client ids, and each id is a client; "
            f"remove them from the data to divide the samples by data.partition"
        )
    return found + [
        f"{key} has no effect with the partition {name}; it is a setting of {' and '.join(partitions)}"
        for key, partitions in PARTITION_SETTINGS.items()
        if changes.get(key, default[key]) != default[key] and name not in partitions and given not in partitions
    ]


def protection_warnings(changes: Mapping[str, Scalar], config: RunConfig) -> list[str]:
    """Return a warning for each changed setting of a protection that is switched off.

    Args:
        changes: Settings that the user has given.
        config: The run's settings.
    """
    default = default_settings()
    off = {
        "dp.": "" if config.dp.epsilon else "dp.epsilon = 0, which trains without noise; set it above 0",
        "secagg.": ""
        if config.secagg.enabled
        else "secagg.enabled = false; set it to true, or the server sees each node's sums",
        "privacy.delta": "" if config.privacy.protects_clients else "privacy.unit = none, for which no epsilon holds",
    }
    return [
        f"{key} has no effect with {reason}"
        for start, reason in off.items()
        for key in sorted(changes)
        if reason and key.startswith(start) and key in default and changes[key] != default[key]
    ]


def adversary_warnings(config: RunConfig, num_nodes: int) -> list[str]:
    """Return the warning for a run with an attack but without a malicious node; usually none.

    A backdoor without malicious nodes is left out: the run then measures the success of chance.

    Args:
        config: The run's settings.
        num_nodes: Number of nodes.

    Raises:
        ConfigError: If the malicious nodes are none of the run's, or all of them.
    """
    adversary = config.adversary
    if adversary.malicious_nodes(config.seed, num_nodes) or adversary.attack in ("none", "backdoor"):
        return []
    return [
        f"adversary.attack = {adversary.attack} has no effect: no node is malicious; set adversary.share or "
        f"adversary.nodes"
    ]


def noise_warnings(config: RunConfig, num_nodes: int, num_parameters: int) -> list[str]:
    """Return the warning for a run in which noise on uploads drowns the clients' changes; usually none.

    Args:
        config: The run's settings.
        num_nodes: Number of nodes.
        num_parameters: Number of parameters that a client trains and shares; of a hypernetwork, those it generates.
    """
    clients = clients_of_a_round(config)
    part = _noise_of_a_mean(config, num_nodes, clients)
    times = part * math.sqrt(num_parameters)
    if times <= LARGEST_NOISE:
        return []
    return [
        f"the noise in the mean of {counted(clients, 'client')} is {part:.2g} privacy.clip-norm in each of "
        f"{num_parameters:,} parameters, and {times:.0f} times as long as a client's change: models that clients "
        f"receive have lost much or all of their accuracy under so much; let more clients take part in a round "
        f"(num-clients, fraction-train), or lower privacy.noise-multiplier to "
        f"{_fitting(config.privacy.noise_multiplier * LARGEST_NOISE / times)} at most (hyperfl dp prints the epsilon)"
    ]


def clients_of_a_round(config: RunConfig) -> int:
    """Return the number of clients that train in a usual round; the last one trains all of them."""
    return max(1, round(config.fraction_train * config.num_clients))


def _noise_of_a_mean(config: RunConfig, num_nodes: int, clients: int) -> float:
    """Return the noise's standard deviation in an element of the applied mean, in units of the clipping norm."""
    privacy = config.privacy
    noise = privacy.noise_multiplier * privacy.server_rate / clients
    if privacy.noise == "local":
        return noise * math.sqrt(clients)
    if privacy.noise == "server":
        return noise
    colluding, threshold = config.secagg.colluding_of(num_nodes), config.secagg.threshold_of(num_nodes, num_nodes)
    return noise * math.sqrt(num_nodes / max(1, unknown_nodes(num_nodes, threshold, colluding)))


def _fitting(multiplier: float) -> str:
    """Return a noise multiplier with two digits, rounded down."""
    digits = 1 - math.floor(math.log10(multiplier))
    return f"{math.floor(multiplier * 10**digits) / 10**digits:.2g}"


def leak_warnings(config: RunConfig, samples: Sequence[int], pool: int = 0) -> list[str]:
    """Return the warnings for a run in which images can be reconstructed from uploads; usually none.

    Args:
        config: The run's settings.
        samples: Number of training samples of each client.
        pool: Number of training samples of the data set, of which a partition may leave some out; 0 if unknown.
    """
    uploads, summed = METHODS[config.method].active_uploads(config, 1), config.secagg.enabled
    attacks = [name for name in attacks_on(uploads, summed=summed) if name != "ig-paper"]
    if not attacks or is_protected(config):
        return []
    if summed:
        return _leaks_of_sums(config, samples, attacks[0], pool)
    of_clients = [config.of_client(client) for client in range(len(config.targets))]
    open_ones = [
        _is_open(of_clients[client % len(of_clients)], number, number) for client, number in enumerate(samples)
    ]
    if not any(open_ones):
        return []
    return [
        f"{sum(open_ones)} of {len(samples)} clients have few training samples, {_most(samples, open_ones)} at most: "
        f"images can be reconstructed from the upload of such a client (hyperfl audit --method {config.method} "
        f"--attacks {attacks[0]}); {_remedy(config, samples, pool)}"
    ]


def _remedy(config: RunConfig, samples: Sequence[int], pool: int) -> str:
    """Return what to do about clients with few training samples; see `leak_warnings`."""
    data, used = config.data, sum(samples)
    more = "fewer clients, num-clients, or data.train-samples"
    if data.partition in EQUAL_SIZES - {"iid"} and data.train_samples == "auto" and used < pool:
        left_out = f"the partition {data.partition} leaves out {pool - used:,} of {pool:,}"
        more = f"{left_out}, data.partition = iid uses all; or fewer clients, num-clients"
    return (
        f"give clients more samples ({more}) and local steps (local-epochs), or set dp.epsilon to "
        f"{LARGEST_EPSILON:g} at most; privacy.clip-norm and privacy.noise-multiplier=0.1 alone are obfuscation: known "
        f"attacks fail, but nothing is guaranteed"
    )


def _is_open(config: RunConfig, samples: int, largest: int) -> bool:
    """Return whether images have been found among so few samples after so few steps.

    Args:
        config: The settings of a client.
        samples: Number of training samples in what the server sees.
        largest: Number of training samples of one client, which decides how many steps it takes.
    """
    if samples <= FEW_SAMPLES:
        return True
    steps = config.local_epochs * math.ceil(largest / config.batch_size)
    return config.target in PERCEPTRONS and samples <= PERCEPTRON_SAMPLES and steps <= PERCEPTRON_STEPS


def _most(samples: Sequence[int], chosen: Sequence[bool]) -> int:
    return max(number for number, is_chosen in zip(samples, chosen, strict=True) if is_chosen)


def is_protected(config: RunConfig) -> bool:
    """Return whether noise keeps the server from reconstructing images: of the steps, on uploads, or of each weight.

    Noisy steps do with an epsilon of at most 10. Noise that the server adds does not. In a secure sum, the noise is
    measured against one client's upload.
    """
    if config.weight_epsilon:
        return True
    privacy, by_steps = config.privacy, 0 < config.dp.epsilon <= LARGEST_EPSILON
    if privacy.noise == "server":
        return by_steps
    return by_steps or (privacy.clip_norm > 0 and privacy.noise_multiplier >= ENOUGH_NOISE)


def _leaks_of_sums(config: RunConfig, samples: Sequence[int], attack: str, pool: int) -> list[str]:
    """Return the warnings for a run in which the server sees only the sum over a round's clients."""
    sampled = clients_of_a_round(config)
    crowd = sorted(samples)[:sampled]
    if not _is_open(config, sum(crowd), crowd[-1]):
        return []
    return [
        f"the {sampled} clients of a round can have {sum(crowd)} training samples in all: images can be reconstructed "
        f"from a secure sum over so few (hyperfl audit --summed --method {config.method} --attacks {attack}); "
        f"{_remedy(config, samples, pool)}"
    ]
