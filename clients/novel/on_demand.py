"""A novel client that requests a model on demand: it describes its samples and uses the model that it receives.

IT-PFL-HN's novel client ("Inference-Time Personalized Federated Learning", under review at ICLR 2022, section 4). Its
owner decides which samples it uses, where results are written, and how the descriptor is protected. Only one descriptor
is released per output folder, see `hyperfl_flwr.privacy.release_once`.

::

    release.npz         the pooled features of the samples, with noise if epsilon is set
    privacy.jsonl       what the descriptor spends, in a simulation; a node keeps it in its state folder
    predictions.csv     file or index, class, confidence
    model.safetensors   the model; model.json describes it, use_model.py uses it
"""

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from clients.engine.node_checks import REFUSED
from hyperfl_flwr.core.errors import ConfigError, DataError, RefusalError, RunDirectoryError
from hyperfl_flwr.core.files.atomic_files import write_atomically
from hyperfl_flwr.data.sample_format import window_of
from hyperfl_flwr.data.unlabelled import Unlabelled, read_unlabelled
from hyperfl_flwr.metrics.predictions import batches
from hyperfl_flwr.models.model_spec import Recipe
from hyperfl_flwr.models.standalone import FACTS, PARAMETERS, SCRIPT, STEM, source_folder, write_model
from hyperfl_flwr.privacy.budget import FILE, PrivacyBudget
from hyperfl_flwr.privacy.private_mean import descriptor_release, from_pooled, private_pooled, refuse_maximum
from hyperfl_flwr.privacy.release_once import digest, release_once
from hyperfl_flwr.protocol.arrays import SharedArrays, layout_problem, not_finite
from hyperfl_flwr.protocol.messages import group_of
from hyperfl_flwr.protocol.queries import DESCRIPTOR

RELEASE, RECORD, PREDICTIONS = "release.npz", FILE, "predictions.csv"
"""Names of files in the output folder."""

Module = TypeVar("Module", bound=nn.Module)


@dataclass(frozen=True, kw_only=True)
class NovelOwner:
    """Settings of the owner of the samples.

    Attributes:
        data: A folder of images, or an `.npz` file.
        output: Folder of the results.
        device: Device that computes.
        epsilon: Privacy parameter epsilon of the descriptor's noise; None for no noise.
        delta: Privacy parameter delta of the descriptor's noise; None for no noise.
        budget: The record of what descriptors spend; None to record nothing.
        min_samples: Least number of samples that a descriptor is computed from.

    Raises:
        ConfigError: If one of epsilon and delta is given without the other, or is out of range.
    """

    data: Path
    output: Path
    device: torch.device
    epsilon: float | None = None
    delta: float | None = None
    budget: PrivacyBudget | None = None
    min_samples: int = 1

    def __post_init__(self) -> None:
        if (self.epsilon is None) != (self.delta is None):
            given, other = ("epsilon", "delta") if self.delta is None else ("delta", "epsilon")
            raise ConfigError(f"noise needs epsilon and delta, got {given} without {other}; give both or neither")
        if self.epsilon is not None and not 0 < self.epsilon < math.inf:
            raise ConfigError(f"epsilon must be above 0 and finite, got {self.epsilon:g}")
        if self.delta is not None and not 0 < self.delta < 1:
            raise ConfigError(f"delta must be above 0 and below 1, got {self.delta:g}")


def samples_of(owner: NovelOwner, recipe: Recipe) -> Unlabelled:
    """Read the owner's samples, and check that they can be described with the owner's privacy settings.

    Raises:
        DataError: If the samples do not fit the run's models, or are too few for noise.
        ConfigError: If the descriptors of the run's encoder cannot be protected by noise.
    """
    if owner.epsilon is not None:
        try:
            refuse_maximum(recipe.pooling)
        except ValueError as error:
            raise ConfigError(f"epsilon cannot be used with this run: {error}") from None
    found = read_unlabelled(owner.data, recipe.input_shape, window=window_of(recipe.window), features=recipe.features)
    if len(found) == 1 and owner.epsilon is not None:
        raise DataError(
            f"{owner.data} holds one sample: noise that hides the only sample leaves no information; give more "
            f"samples, or no epsilon"
        )
    return found


def notes_on(owner: NovelOwner, found: Unlabelled) -> list[str]:
    """Return notes for the owner about the samples and the protection of the descriptor."""
    notes = list(found.notes)
    if len(found) == 1:
        notes.append("there is only one sample: the descriptor is computed from its features without averaging")
    if owner.epsilon is None:
        notes.append("the descriptor has no noise; give epsilon and delta to protect single samples")
    return notes


def refuse_other_model(output: Path) -> None:
    """Check that a folder has no model or predictions but those of a request for a model, which the next would replace.

    A request stores its release before it writes them, and nothing removes the release.

    Raises:
        RunDirectoryError: If the folder has some without a release.
    """
    written = (PREDICTIONS, PARAMETERS, FACTS, SCRIPT, source_folder(STEM))
    found = [name for name in written if (output / name).exists()]
    if found and not (output / RELEASE).exists():
        raise RunDirectoryError(
            f"the output folder {output} holds {', '.join(found)} of another command, which would be replaced; "
            f"choose another one"
        )


class OnDemandClient:
    """A novel client: computes a descriptor, and predicts with the model that it receives.

    Args:
        owner: The owner's settings; a missing output folder is created.
        recipe: Specification of the run's models.

    Raises:
        RunDirectoryError: If the output folder has a model of another command.
        HyperFLError: If the samples do not fit, see `samples_of`.
    """

    def __init__(self, owner: NovelOwner, recipe: Recipe) -> None:
        self.owner, self.recipe = owner, recipe
        self.found = samples_of(owner, recipe)
        refuse_other_model(owner.output)
        owner.output.mkdir(mode=0o700, parents=True, exist_ok=True)

    def describe(self, received: SharedArrays) -> tuple[SharedArrays, int]:
        """Return the descriptor [1, d] of all samples, and their number.

        Args:
            received: The encoder, keyed `encoder/name`. The same encoder always gets the same answer.

        Raises:
            ValueError: If the arrays are not those of the encoder.
            StateError: If another descriptor has been released into the output folder.
            RefusalError: If the owner's privacy budget does not allow it, or there are fewer samples than the owner
                allows.
        """
        if len(self.found) < self.owner.min_samples:
            raise RefusalError(
                f"min-samples = {self.owner.min_samples}, but {self.owner.data} holds {len(self.found)}; no descriptor "
                f"is sent. Give it more samples, or lower min-samples in the node config",
                public=REFUSED,
            )
        encoder = self._loaded(self.recipe.new_encoder(), received, "encoder")
        # A release is repeated only for equal inputs; each further noisy release would cost privacy budget.
        made_of = {
            "samples": digest([self.found.samples]),
            "encoder": digest(received[key] for key in sorted(received)),
            "recipe": repr(self.recipe),
            "epsilon": self.owner.epsilon,
            "delta": self.owner.delta,
        }

        def pooled() -> NDArray[np.float64]:
            if self.owner.budget:
                self.owner.budget.spend(0, descriptor_release(self.owner.epsilon, self.owner.delta))
            samples = torch.cat(list(self._batches()))
            if self.owner.epsilon is None or self.owner.delta is None:
                exact: NDArray[np.float64] = encoder.pooled(samples).cpu().numpy()
                return exact
            return private_pooled(encoder, samples, epsilon=self.owner.epsilon, delta=self.owner.delta)

        vector = release_once(self.owner.output / RELEASE, made_of, pooled)
        return {DESCRIPTOR: from_pooled(encoder, vector).cpu().numpy()[np.newaxis]}, len(self.found)

    def personalize(self, received: SharedArrays) -> int:
        """Predict all samples and write predictions and model; returns the number of samples.

        Args:
            received: The model, keyed `model/name`.

        Raises:
            ValueError: If the arrays are not those of the target network.
        """
        target = self._loaded(self.recipe.new_target(), received, "model")
        with torch.no_grad():
            confidences, labels = torch.cat([target(batch).softmax(dim=1) for batch in self._batches()]).max(dim=1)
        write_model(self.owner.output, target.state_dict(), self.recipe, self._about())
        table = self._table(labels.tolist(), confidences.tolist())
        write_atomically(self.owner.output / PREDICTIONS, table.encode(), mode=0o600)
        return len(self.found)

    def _batches(self) -> Iterator[Tensor]:
        """Yield batches of the normalised samples on the device."""
        return batches(self.found, self.recipe, self.owner.device)

    def _loaded(self, module: Module, received: SharedArrays, group: str) -> Module:
        """Validate received values (untrusted input) and load them into a module on the meta device, for evaluation."""
        # Broadcast zeros describe the layout without allocating memory.
        expected = {
            f"{group}/{name}": np.broadcast_to(np.zeros((), np.float32), tuple(value.shape))
            for name, value in module.state_dict().items()
        }
        if problem := layout_problem(expected, received):
            raise ValueError(problem)
        if key := not_finite(received):
            raise ValueError(f"{key} is not finite")
        values = {
            key.partition("/")[2]: torch.tensor(value) for key, value in received.items() if group_of(key) == group
        }
        module.load_state_dict(values, assign=True)
        return module.eval().to(self.owner.device)

    def _about(self) -> Mapping[str, object]:
        """Return the entries of model.json about the descriptor that the model was generated from."""
        return {
            "descriptor": {
                "samples": len(self.found), "length": self.recipe.descriptor_length,
                "epsilon": self.owner.epsilon, "delta": self.owner.delta,
            },
            "notes": notes_on(self.owner, self.found),
        }  # fmt: skip

    def _table(self, labels: Sequence[int], confidences: Sequence[float]) -> str:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([self.found.column, "class", "confidence"])
        for name, label, confidence in zip(self.found.names, labels, confidences, strict=True):
            writer.writerow([name, self.recipe.classes[label], f"{confidence:.6f}"])
        return text.getvalue()
