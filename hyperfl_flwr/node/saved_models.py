"""A client's model as it was after its last local training, on the node's own disk.

It lies beside the private state and is for the node's owner: `hyperfl export` makes a file for plain torch of it. No
message holds it and nothing reads it in a round, so there is one version, the newest. A SuperNode keeps the models of
its clients unless its node config has `keep-model=false`; a simulated node keeps none, since its run's folder has what
they are made of.
"""

from dataclasses import dataclass
from pathlib import Path

from hyperfl_flwr.core.errors import StateError
from hyperfl_flwr.core.storage import Arrays, read_arrays, unwritable, write_arrays
from hyperfl_flwr.models.custom.provenance import find_kept, keep_model
from hyperfl_flwr.models.model_spec import TargetRecipe

FILE = "model.npz"


@dataclass(frozen=True, kw_only=True)
class KeptModel:
    """A client's model and what it is.

    Attributes:
        client: The client's id.
        experiment: Identity of the run.
        round: The federated round whose local training made it.
        method: Of the run.
        dataset: The data that it was trained on: their name, or that of a file or folder without the path to it.
        accuracy: On the client's test data, in [0, 1]; NaN without any.
        test_examples: Their number.
        recipe: How the model is used.
        tensors: Values of the target network by name.
    """

    client: int
    experiment: str
    round: int
    method: str
    dataset: str
    accuracy: float
    test_examples: int
    recipe: TargetRecipe
    tensors: Arrays

    def write(self, folder: Path) -> None:
        """Replace the model in a client's folder, which is made where it is missing; for its owner alone.

        Raises:
            StateError: If it cannot be written, as on a full disk; the older one is there as before.
        """
        meta = {name: value for name, value in vars(self).items() if name not in ("recipe", "tensors")}
        try:
            for directory in (folder.parent, folder):
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            keep_model(self.recipe.target, folder.parent)
            write_arrays(folder / FILE, self.tensors, {**meta, "recipe": self.recipe.values()}, mode=0o600)
        except OSError as error:
            size = sum(value.nbytes for value in self.tensors.values())
            raise StateError(
                f"the model of client {self.client} after round {self.round} is not kept: "
                f"{unwritable(folder, error, size)}, or set keep-model = false in node.toml"
            ) from error

    @classmethod
    def read(cls, folder: Path) -> "KeptModel":
        """Read what `write` has written.

        Raises:
            StateError: If it is missing or damaged.
        """
        tensors, meta = read_arrays(folder / FILE)
        try:
            find_kept(str(meta["recipe"]["target"]), folder.parent)
            return cls(tensors=tensors, recipe=TargetRecipe.of(meta.pop("recipe")), **meta)
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(
                f"{folder / FILE} is no model that this version of hyperfl-flwr can read ({error}); train again"
            ) from None
