"""Warn before a run starts if its settings are known to leak private images, or some of them have no effect.

The thresholds come from measurements with `hyperfl audit` (docs/privacy/audit.md): its attacks have reconstructed
images from the upload of a client with a few samples, and none from a client with 600 samples and 60 steps. The
absence of a warning is not a guarantee of privacy.
"""

from collections.abc import Mapping, Sequence

from hyperfl_flwr.attacks.registry import attacks_on
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.config.table import default_settings
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.data.federated_data import FederatedData
from hyperfl_flwr.methods import METHODS

FEW_SAMPLES = 8
"""Largest number of samples in an upload from which this project's attacks have reconstructed images."""

ENOUGH_NOISE = 0.03
"""Smallest noise multiplier at which they have reconstructed none, with any prior."""

LARGEST_EPSILON = 10.0
"""Largest `dp.epsilon` at which noisy steps count as protection; a larger one adds little noise."""


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


def lie_warnings(config: RunConfig, num_nodes: int) -> list[str]:
    """Return the warning for a run with an attack but without a node that lies; usually none.

    A backdoor without liars is left out: the run then measures the success of chance.

    Args:
        config: The run's settings.
        num_nodes: Number of nodes.

    Raises:
        ConfigError: If the lying nodes are none of the run's, or all of them.
    """
    adversary = config.adversary
    if adversary.lying_nodes(config.seed, num_nodes) or adversary.attack in ("none", "backdoor"):
        return []
    return [
        f"adversary.attack = {adversary.attack} has no effect: no node lies; set adversary.share or adversary.nodes"
    ]


def leak_warnings(config: RunConfig, samples: Sequence[int]) -> list[str]:
    """Return the warnings for a run in which images can be reconstructed from uploads; usually none.

    Args:
        config: The run's settings.
        samples: Number of training samples of each client.
    """
    attacks = [name for name in attacks_on(METHODS[config.method].active_uploads(config, 1)) if name != "ig-paper"]
    if not attacks or is_protected(config):
        return []
    if config.secagg.enabled:
        return _leaks_of_sums(config, samples, attacks[0])
    few = sum(number <= FEW_SAMPLES for number in samples)
    if not few:
        return []
    return [
        f"{few} of {len(samples)} clients have {FEW_SAMPLES} training samples or fewer: images can be reconstructed "
        f"from the upload of such a client (hyperfl audit --method {config.method} --attacks {attacks[0]}); give "
        f"clients more samples (data.train-samples), or set privacy.clip-norm and privacy.noise-multiplier=0.1"
    ]


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


def _leaks_of_sums(config: RunConfig, samples: Sequence[int], attack: str) -> list[str]:
    """Return the warnings for a run in which the server sees only the sum over a round's clients."""
    sampled = max(1, round(config.fraction_train * config.num_clients))
    crowd = sum(sorted(samples)[:sampled])
    if crowd > FEW_SAMPLES:
        return []
    return [
        f"the {sampled} clients of a round can have {crowd} training samples in all: images can be reconstructed from "
        f"a secure sum over so few (hyperfl audit --summed --method {config.method} --attacks {attack}); give clients "
        f"more samples (data.train-samples), or set privacy.clip-norm and privacy.noise-multiplier=0.1"
    ]
