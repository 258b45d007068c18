"""What an honest-but-curious server sees of one client in one round, and what it knows anyway.

An attack gets an `Observation` and a `PublicKnowledge` and nothing else: no private group, no image, no label. Under
secure aggregation the observation is the clients' mean.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperfl_flwr.attacks.encoder_knowledge import EncoderKnowledge
from hyperfl_flwr.attacks.shared_steps import local_steps, rates
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.errors import StateError
from hyperfl_flwr.core.storage import read_arrays, write_arrays
from hyperfl_flwr.models.layers.dropout import has_dropout
from hyperfl_flwr.models.targets import build_target
from hyperfl_flwr.training.dual_averaging import DualRule
from hyperfl_flwr.training.dual_stability import dual_rule

Arrays = Mapping[str, NDArray[Any]]
"""Arrays by `group/name`."""

_OWNER_ONLY = 0o600


@dataclass(frozen=True, kw_only=True, eq=False)
class Observation:
    """One client's part of one round, as it passes the server.

    Attributes:
        received: What the server sent to the client.
        reply: What it got back, under the same keys: parameters, or for a model of `GENERATED` its change (before minus
            after), for PRIV-HFL the change of the client's model (after minus before).
        num_examples: Number n of training samples, which the reply tells.
        client: Its id.
        round: The federated round, from 1.
        metrics: The numbers that came with the reply, for example `train-loss`.
        earlier: What the server saw of the same client in the rounds before, oldest first, where an attack follows it.
    """

    received: Arrays
    reply: Arrays
    num_examples: int
    client: int = 0
    round: int = 1
    metrics: Mapping[str, float] = field(default_factory=dict)
    earlier: Sequence["Observation"] = ()

    def __post_init__(self) -> None:
        """Check that both directions have the same layout.

        Raises:
            ValueError: If keys or shapes differ, or there are no examples.
        """
        sent = {key: value.shape for key, value in self.received.items()}
        if not sent or sent != {key: value.shape for key, value in self.reply.items()}:
            raise ValueError(f"a reply must have the keys and shapes of what was sent: {', '.join(sent) or 'nothing'}")
        if self.num_examples < 1:
            raise ValueError(f"num_examples must be positive, got {self.num_examples}")


@dataclass(frozen=True, kw_only=True)
class PublicKnowledge:
    """Architecture, normalisation and hyper-parameters of a run: the server wrote them, or reads them in the code.

    Attributes:
        method: Name of the method, for example `hyperfl`.
        target: Name of the target network, see `hyperfl_flwr.models.targets.TARGETS`.
        input_shape: (channels, height, width); the attacks search for images.
        num_classes: K.
        mean: Per channel, subtracted from pixels in [0, 1].
        std: Per channel, divided by.
        augmented: Whether clients train on randomly cropped and flipped images; an attack then finds those.
        local_epochs: Passes E over the client's data.
        local_steps: If positive, the number of steps instead (`GENERATED`, PRIV-HFL).
        batch_size: Samples per step.
        learning_rate: Step size of what is shared.
        momentum: Of SGD, with buffers that start empty.
        weight_decay: L2 coefficient.
        clip_norm: Largest gradient norm of what is shared; 0 does not clip.
        embedding_dim: Of HyperFL's embedding; 0 without.
        hidden_width: Of HyperFL's hypernetwork; 0 without.
        embedding_frozen: Whether HyperFL's embedding and first layer are constants.
        initialisation: How HyperFL's hypernetwork was drawn, see `hyperfl_flwr.models.hypernetwork.Initialisation`.
        summed_clients: Number N of clients whose mean a reply is, see `mean_observation`; 1 is a client's own upload.
        seed: Of the run; what all clients start from follows from it.
        dual: How PRIV-HFL's multipliers move; None for other methods.
        pseudo_samples: Number P of pseudo-data that PRIV-HFL's client makes; 0 without distillation.
        generator_width: Of its generator; 0 without distillation.
        class_balance: c, by which it draws their labels; 0 without distillation.
        encoder: How IT-PFL-HN's encoder is trained; None for other methods.
    """

    method: str
    target: str
    input_shape: tuple[int, ...]
    num_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    local_epochs: int
    batch_size: int
    learning_rate: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip_norm: float = 0.0
    local_steps: int = 0
    augmented: bool = False
    embedding_dim: int = 0
    hidden_width: int = 0
    embedding_frozen: bool = False
    initialisation: str = ""
    summed_clients: int = 1
    seed: int = 0
    dual: DualRule | None = None
    pseudo_samples: int = 0
    generator_width: int = 0
    class_balance: float = 0.0
    encoder: EncoderKnowledge | None = None

    def __post_init__(self) -> None:
        """Check lengths and ranges.

        Raises:
            ValueError: If the data are no images, the target network has dropout or no bias in its classifier, mean or
                std do not have one number per channel, or a number is out of range.
        """
        if len(self.input_shape) != 3:
            raise ValueError(f"the attacks search for images, the data are vectors of the shape {self.input_shape}")
        target = build_target(self.target, self.input_shape, self.num_classes)
        if has_dropout(target):
            raise ValueError(f"the attacks cannot repeat local steps with dropout, which the {self.target} target has")
        if target.classifier.bias is None:
            raise ValueError(f"the attacks read labels off the classifier's bias, which the {self.target} target lacks")
        if not len(self.mean) == len(self.std) == self.input_shape[0]:
            raise ValueError(f"mean and std need {self.input_shape[0]} numbers, got {self.mean} and {self.std}")
        if not (self.learning_rate > 0 and self.batch_size > 0 and (self.local_epochs > 0 or self.local_steps > 0)):
            raise ValueError("learning_rate, batch_size and the number of local epochs or steps must be positive")

    @classmethod
    def of(
        cls,
        config: RunConfig,
        *,
        input_shape: tuple[int, ...],
        num_classes: int,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        learning_rate: float,
        augmented: bool,
    ) -> "PublicKnowledge":
        """Take the settings that matter from a run's configuration.

        Args:
            config: The run's settings.
            input_shape: Of the data set, (channels, height, width).
            num_classes: Of the data set.
            mean: Of its normalisation.
            std: Of its normalisation.
            learning_rate: The setting, or the data set's own where that is `auto`.
            augmented: Whether the data set is used with augmentation.
        """
        hyperfl, distills = config.method == "hyperfl", config.method == "priv-hfl" and config.priv_hfl.distill
        learning_rate, weight_decay, clip_norm = rates(config, learning_rate)
        return cls(
            method=config.method,
            target=config.target,
            input_shape=input_shape,
            num_classes=num_classes,
            mean=mean,
            std=std,
            augmented=augmented,
            local_epochs=config.local_epochs,
            local_steps=local_steps(config),
            batch_size=config.batch_size,
            learning_rate=learning_rate,
            momentum=config.momentum,
            weight_decay=weight_decay,
            clip_norm=clip_norm,
            embedding_dim=config.hyperfl.embedding_dim if hyperfl else 0,
            hidden_width=config.hyperfl.hidden_width if hyperfl else 0,
            embedding_frozen=hyperfl and config.hyperfl.embedding == "common-frozen",
            initialisation=config.hyperfl.initialisation if hyperfl else "",
            seed=config.seed,
            dual=dual_rule(config) if config.method == "priv-hfl" else None,
            pseudo_samples=config.priv_hfl.pseudo_samples if distills else 0,
            generator_width=config.priv_hfl.generator_width if distills else 0,
            class_balance=config.priv_hfl.class_balance if distills else 0.0,
            encoder=EncoderKnowledge.of(config),
        )

    def num_steps(self, num_examples: int) -> int:
        """Return how many steps a client takes on what is shared, for a reply that has so many samples behind it."""
        own = math.ceil(num_examples / self.summed_clients)
        return self.local_steps or self.local_epochs * math.ceil(own / self.batch_size)


def mean_observation(observations: Iterable[Observation]) -> Observation:
    """Return what is left of one round's replies under secure aggregation: their mean, and all samples' number.

    Args:
        observations: Of clients with equally many samples, and so with equally many steps; each is read once, and only
            one of them is kept in memory.

    Returns:
        The mean in the precision of the replies. It is a reply of its own, with the mean of the clients' mean
        gradients, because a reply is linear in them.

    Raises:
        ValueError: If the clients received or hold unequal amounts, or there are none.
    """
    first: Observation | None = None
    totals: dict[str, NDArray[np.float64]] = {}
    number = 0
    for observation in observations:
        first, number = first or observation, number + 1
        if observation.num_examples != first.num_examples:
            raise ValueError(f"a sum needs equally many samples: {first.num_examples}, {observation.num_examples}")
        if any(not np.array_equal(value, first.received[key]) for key, value in observation.received.items()):
            raise ValueError("a sum tells nothing about parameters that every client received others of")
        for key, value in observation.reply.items():
            totals[key] = totals[key] + value if key in totals else value.astype(np.float64)
    if first is None:
        raise ValueError("the sum of no replies does not exist")
    reply = {key: (total / number).astype(first.reply[key].dtype) for key, total in totals.items()}
    return Observation(
        received=first.received, reply=reply, num_examples=number * first.num_examples, round=first.round
    )


def observation_path(run_directory: Path, server_round: int, client: int) -> Path:
    """Return where a run keeps what its server saw of a client in a round."""
    return run_directory / "observations" / f"round-{server_round:06d}-client-{client:05d}.npz"


def save_observation(path: Path, observation: Observation) -> None:
    """Write an observation to a file that only its owner may read."""
    arrays = {f"received/{key}": value for key, value in observation.received.items()}
    arrays |= {f"reply/{key}": value for key, value in observation.reply.items()}
    meta = {
        "num-examples": observation.num_examples,
        "client": observation.client,
        "round": observation.round,
        "metrics": dict(observation.metrics),
    }
    write_arrays(path, arrays, meta, mode=_OWNER_ONLY)


def load_observation(path: Path) -> Observation:
    """Read what `save_observation` wrote.

    Raises:
        StateError: If the file is missing, damaged, or holds something else.
    """
    arrays, meta = read_arrays(path)
    try:
        return Observation(
            received=_direction(arrays, "received"),
            reply=_direction(arrays, "reply"),
            num_examples=int(meta["num-examples"]),
            client=int(meta["client"]),
            round=int(meta["round"]),
            metrics={str(name): float(value) for name, value in meta["metrics"].items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StateError(
            f"{path} holds no observation of this version ({type(error).__name__}: {error}); record it again"
        ) from error


def _direction(arrays: Arrays, prefix: str) -> dict[str, NDArray[Any]]:
    found = {key.partition("/")[2]: np.asarray(value) for key, value in arrays.items()
             if key.partition("/")[0] == prefix}  # fmt: skip
    if bad := [key for key, value in found.items() if value.dtype.kind != "f"]:
        raise ValueError(f"arrays must be floating point: {', '.join(bad)}")
    return found
