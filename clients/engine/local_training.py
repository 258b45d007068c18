"""How clients train as far as a run's settings tell: clients train by it, and attacks are given it."""

from clients.engine.context import ClientSetting
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.setting_types import number
from hyperfl_flwr.training.local_sgd import Epochs
from hyperfl_flwr.training.public_training import LocalSteps, PublicTraining


class LocalTraining:
    """The steps that settings ask for: passes of plain SGD over the data, unless a method says otherwise.

    Attributes:
        setting: Where the client works.
    """

    setting: ClientSetting

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
        return self.local_steps(self.setting.config)

    def epochs(self) -> Epochs:
        """Return the local epochs that the run's settings ask for."""
        return self.steps
