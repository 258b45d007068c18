"""The models of a client that are evaluated and exported."""

from collections.abc import Mapping

from torch import Tensor

from hyperfl_flwr.models.target import Target
from hyperfl_flwr.protocol.messages import group_of
from hyperfl_flwr.training.local_sgd import Predict


class OwnModels:
    """The client's model, and the one that the metrics `aggregate` are of.

    Attributes:
        model: The target network.
    """

    model: Target

    def predictor(self) -> Predict:
        """Return the client's current model, as a function from samples to logits."""
        return self.model

    def received_predictor(self) -> Predict:
        """Return the model that the metrics `aggregate` are of, before local training; by default the client's."""
        return self.predictor()

    def target_state(self) -> Mapping[str, Tensor]:
        """Return the client's current model: values of the whole target network by name, on the device."""
        return self.model.state_dict()

    def received_state(self) -> Mapping[str, Tensor]:
        """Return the model that the metrics `aggregate` are of, as `target_state` does; by default the client's."""
        return self.target_state()

    def personalized_model(self, stored: Mapping[str, Tensor]) -> Mapping[str, Tensor] | None:
        """Return the client's model after its last local training, as `target_state` does.

        Args:
            stored: The private groups of that round, keyed `group/name`.

        Returns:
            The model; None if the private groups alone cannot rebuild it.
        """
        per_client = {key.partition("/")[2]: value for key, value in stored.items() if group_of(key) == "model"}
        return per_client or None
