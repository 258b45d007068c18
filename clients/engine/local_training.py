"""Local training as a run's public settings define it, for clients and for attacks that simulate them."""

from clients.engine.context import ClientContext
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.setting_types import resolved_number
from hyperfl_flwr.models.target import Target
from hyperfl_flwr.training.local_sgd import Epochs, ParameterSet
from hyperfl_flwr.training.public_training import LocalSteps, PublicTraining


class LocalTraining:
    """Local steps of a method's clients; by default passes of plain SGD over the client's data.

    Attributes:
        context: The client's context.
        model: The target network; a client without it overrides the methods that use it.
    """

    context: ClientContext
    model: Target

    @classmethod
    def local_steps(cls, config: RunConfig) -> LocalSteps:
        """Return the local steps that train the shared parameters.

        Args:
            config: The run's settings, with the method's `auto` values replaced.
        """
        return LocalSteps(
            epochs=config.local_epochs,
            batch_size=config.batch_size,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            learning_rate=resolved_number(config.learning_rate),
        )

    @classmethod
    def public_training(cls, config: RunConfig) -> PublicTraining:
        """Return all public knowledge of local training, with which `hyperfl audit` attacks."""
        return PublicTraining(steps=cls.local_steps(config))

    @property
    def steps(self) -> LocalSteps:
        """The local steps that train the shared parameters."""
        return self.local_steps(self.context.config)

    def epochs(self) -> Epochs:
        """Return the number of local epochs and the SGD settings of the run."""
        return self.steps

    def parameter_sets(self) -> list[ParameterSet]:
        """Return the parameters to train and their rates; by default the target network, by `steps`.

        The anchor of a pull is a copy of the current values, which are those received.
        """
        steps, parameters = self.steps, list(self.model.parameters())
        return [
            ParameterSet(
                parameters=parameters,
                learning_rate=steps.learning_rate,
                clip_norm=steps.clip_norm,
                pull=steps.pull,
                anchor=[parameter.detach().clone() for parameter in parameters] if steps.pull > 0 else (),
            )
        ]
