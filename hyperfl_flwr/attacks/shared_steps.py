"""How a run's clients step what they share: public, since it is in the run's settings."""

import math

from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.models.hypernetwork import frozen_hidden

GENERATED = ("pfedhn", "pfedhn-pc", "it-pfl")
"""Methods whose server generates the clients' models and gets the change of them (before minus after)."""


def rates(config: RunConfig, learning_rate: float) -> tuple[float, float, float]:
    """Return learning rate, weight decay and clip norm of the steps on what is shared."""
    weight_decay, clip_norm = config.weight_decay, _clip_norm(config)
    if config.method == "hyperfl-frozen":  # FedRep's round at other rates
        method = config.hyperfl
        hidden = frozen_hidden(method.embedding_dim, method.hidden_width, method.initialisation, config.seed)
        factor = 1 + float(hidden.square().sum())
        learning_rate, weight_decay = learning_rate * factor, weight_decay / factor
        clip_norm = method.clip_norm / math.sqrt(factor)
    return learning_rate, weight_decay, clip_norm


def local_steps(config: RunConfig) -> int:
    """Return the number of local steps that the method's settings ask for; 0 where they ask for passes."""
    generated = dict.fromkeys(GENERATED, config.pfedhn.local_steps)
    return (generated | {"priv-hfl": config.priv_hfl.local_steps}).get(config.method, 0)


def _clip_norm(config: RunConfig) -> float:
    norms = {"hyperfl": config.hyperfl.clip_norm, "fedrep": config.fedrep.clip_norm}
    norms |= {"priv-hfl": config.priv_hfl.clip_norm} | dict.fromkeys(GENERATED, config.pfedhn.clip_norm)
    return norms.get(config.method, 0.0)
