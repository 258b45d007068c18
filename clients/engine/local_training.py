"""How clients train as far as a run's settings tell: clients train by it, and attacks are given it."""

from clients.engine.context import ClientContext
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.setting_types import number
from hyperfl_flwr.models.target import Target
from hyperfl_flwr.training.local_sgd import Epochs, ParameterSet
from hyperfl_flwr.training.public_training import LocalSteps, PublicTraining


class LocalTraining:
    """The steps that settings ask for: passes of plain SGD over the data, unless a method says otherwise.

    Attributes:
        context: Where the client works.
        model: The target network; a method without it overrides what uses it.
    """

    context: ClientContext
    model: Target

    @classmethod
    def local_steps(cls, config: RunConfig) -> LocalSteps:
        """Return the steps on what is shared that a run's settings ask for: clients train by them.

        Args:
            config: The run's settings, without any `auto` of the method's.
        """
        return LocalSteps(
            epochs=config.local_epochs,
            batch_size=config.batch_size,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            learning_rate=number(config.learning_rate),
        )

    @classmethod
    def public_training(cls, config: RunConfig) -> PublicTraining:
        """Return all that a run's settings tell of local training; `hyperfl audit` attacks with it."""
        return PublicTraining(steps=cls.local_steps(config))

    @property
    def steps(self) -> LocalSteps:
        """The steps on what is shared."""
        return self.local_steps(self.context.config)

    def epochs(self) -> Epochs:
        """Return the local epochs that the run's settings ask for."""
        return self.steps

    def parameter_sets(self) -> list[ParameterSet]:
        """Return what is trained and how, by default the whole target network by `steps`, anchored where it is now."""
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
