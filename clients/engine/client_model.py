"""The models of a client: the one that it uses, the one that it received, and the one that can be exported."""

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from clients.engine.context import ClientContext
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.models.lowered import in_bfloat16
from hyperfl_flwr.models.target import Target
from hyperfl_flwr.models.targets import build_target
from hyperfl_flwr.protocol.messages import group_of
from hyperfl_flwr.training.local_sgd import Predict


class ClientModel:
    """The target network of a client as predictor and as exported values.

    Attributes:
        context: The client's context.
        model: The target network; a client without it overrides the methods that use it.
        is_network: Whether `predictor` is the target network with the values of `target_state`, and nothing else.
        model_group: Name of the private group that holds the client's model after local training, if one does.
    """

    context: ClientContext
    model: Target
    is_network: ClassVar[bool] = True
    model_group: ClassVar[str] = "model"

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
        """Return the model of `received_predictor`, as `target_state` does; by default the client's current model."""
        return self.target_state()

    def personalized_model(self, stored: Mapping[str, Tensor]) -> Mapping[str, Tensor] | None:
        """Return the client's model after its last local training, as `target_state` does.

        Args:
            stored: The private groups of that round, keyed `group/name`.

        Returns:
            The model; None if the private groups alone cannot rebuild it.
        """
        found = {key.partition("/")[2]: value for key, value in stored.items() if group_of(key) == self.model_group}
        return found or None

    @classmethod
    def hides_models(cls, config: RunConfig) -> bool:
        """Return whether the method hides the clients' models from the server, so that no whole model may be sent."""
        return False

    @classmethod
    def why_no_model(cls, config: RunConfig) -> str:
        """Return why the private groups cannot rebuild the model after local training, where they cannot."""
        return f"with {config.method}, only a SuperNode keeps it"

    def new_target(self) -> Target:
        """Return the target network for the client's data, on the meta device, in the run's precision."""
        data, config = self.context.data, self.context.config
        target = build_target(config.target, tuple(data.train_images.shape[1:]), data.num_classes)
        return in_bfloat16(target) if config.precision == "bf16" else target

    def copied_model(self) -> Target:
        """Return a copy of the target network with its current values."""
        values = {name: value.detach().clone() for name, value in self.model.state_dict().items()}
        copy = self.new_target()
        copy.load_state_dict(values, assign=True)
        return copy
