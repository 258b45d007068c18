"""Settings that are known to give private images away, told before a run starts.

What is known is what `hyperfl audit` has measured (docs/privacy/audit.md): a handful of samples can be rebuilt from one
upload, 600 samples in 60 steps have not been. Nobody should read the absence of a warning as a promise.
"""

from collections.abc import Sequence

from hyperfl_flwr.attacks.registry import attacks_on
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.methods import METHODS

FEW_SAMPLES = 8
"""The most samples of a client whose images attacks of this project have rebuilt from one upload."""

ENOUGH_NOISE = 0.03
"""The smallest noise multiplier at which they have not, whatever the prior."""


def leak_warnings(config: RunConfig, samples: Sequence[int]) -> list[str]:
    """Return what a run's owner should know before it starts; usually nothing.

    Args:
        config: The run's settings.
        samples: Training samples of each client.
    """
    attacks = [name for name in attacks_on(METHODS[config.method].sent(config, 1)) if name != "ig-paper"]
    protected = config.privacy.clip_norm > 0 and config.privacy.noise_multiplier >= ENOUGH_NOISE
    few = sum(number <= FEW_SAMPLES for number in samples)
    if not attacks or protected or not few:
        return []
    return [
        f"{few} of {len(samples)} clients have {FEW_SAMPLES} training samples or fewer: whoever sees such a client's "
        f"upload can rebuild images from it (hyperfl audit --method {config.method} --attacks {attacks[0]}); give "
        f"clients more samples (data.train-samples), or set privacy.clip-norm and privacy.noise-multiplier=0.1"
    ]
