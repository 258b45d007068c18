"""Save each client's personalized model (after its last local training) on the node's disk.

The file lies next to the private state and is for the node's owner: `hyperfl export` converts it to a file for plain
torch. No round reads it, so only the newest version is kept; no message contains it but that of a cross-site matrix,
which the owner must allow. A SuperNode keeps the models of its clients unless its node config has `keep-model=false`. A
simulated node keeps none without `cross-site`, since the models can be rebuilt from the run's folder.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hyperfl_flwr.core.errors import StateError
from hyperfl_flwr.core.files.atomic_files import unwritable
from hyperfl_flwr.core.files.storage import Arrays, read_arrays, write_arrays
from hyperfl_flwr.core.packages.user_code import user_code_in
from hyperfl_flwr.core.tasks import TASKS
from hyperfl_flwr.models.model_spec import TargetRecipe
from hyperfl_flwr.node.private_state import create_client_folder, run_folder

FILE = "model.npz"

TRAINED_ON = ":trained-on"
"""Key of the digests among the parameters, none of which has a colon in its name."""


@dataclass(frozen=True, kw_only=True)
class KeptModel:
    """A client's model with its description.

    Attributes:
        client: The client's id.
        experiment: Identity of the run.
        round: The federated round of the last local training.
        method: The run's method.
        dataset: Name of the training data; for a file or folder, its name without the path.
        score: Main score of the task on the client's test data; NaN without test data.
        test_examples: Number of test samples.
        recipe: Description of how to build and use the model.
        tensors: Parameters of the target network by name.
        trained_on: Digests of the client's training samples [n], by which `hyperfl predict` recognises them.
    """

    client: int
    experiment: str
    round: int
    method: str
    dataset: str
    score: float
    test_examples: int
    recipe: TargetRecipe
    tensors: Arrays
    trained_on: NDArray[np.uint64]

    def write(self, folder: Path) -> None:
        """Write the model to a client's folder, replacing an older one.

        The folder is created if missing; only its owner has access.

        Raises:
            StateError: If the model cannot be written, for example on a full disk; an older model is unchanged.
        """
        left_out = ("recipe", "tensors", "trained_on", "score")
        meta = {name: value for name, value in vars(self).items() if name not in left_out}
        meta[TASKS[self.recipe.task].score] = self.score
        try:
            create_client_folder(folder)
            for network in user_code_in({"target": self.recipe.target}):
                network.keep(run_folder(folder))
            arrays = {**self.tensors, TRAINED_ON: self.trained_on}
            write_arrays(folder / FILE, arrays, {**meta, "recipe": self.recipe.values()}, mode=0o600)
        except OSError as error:
            size = sum(value.nbytes for value in self.tensors.values())
            raise StateError(
                f"the model of client {self.client} after round {self.round} is not saved: "
                f"{unwritable(folder, error, size)}, or set keep-model = false in node.toml"
            ) from error

    @classmethod
    def read(cls, folder: Path) -> "KeptModel":
        """Read a model that `write` has written.

        Raises:
            StateError: If the file is missing, damaged or of an incompatible version.
        """
        tensors, meta = read_arrays(folder / FILE)
        try:
            for network in user_code_in({"target": str(meta["recipe"]["target"])}):
                network.find_kept(run_folder(folder))
            known = tensors.pop(TRAINED_ON, np.zeros(0, np.uint64))  # files of earlier versions lack it
            recipe = TargetRecipe.of(meta.pop("recipe"))
            score = meta.pop(TASKS[recipe.task].score)
            return cls(tensors=tensors, trained_on=known, recipe=recipe, score=score, **meta)
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(
                f"{folder / FILE} is not a model that this version of hyperfl-flwr can read ({error}); train again"
            ) from None
