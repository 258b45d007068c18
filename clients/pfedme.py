"""pFedMe's client: finds a personalized model near its copy of the common one, which follows it.

T. Dinh, Tran, Nguyen: "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020, algorithm 1;
`hyperfl_flwr.training.pfedme` has the steps. The client uploads its copy w of the global model and uses theta.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
from torch import Tensor, nn

from clients.fedavg import FedAvgClient
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.methods.pfedme import PFedMeConfig
from hyperfl_flwr.models.target import Target
from hyperfl_flwr.protocol.arrays import SharedArrays
from hyperfl_flwr.protocol.messages import Reduction
from hyperfl_flwr.training.pfedme import ProximalSteps, train_pfedme
from hyperfl_flwr.training.public_training import PublicTraining


class PFedMeClient(FedAvgClient):
    """Keeps no state: the personalized model starts from the received one in each round."""

    shared: ClassVar[Mapping[str, Reduction]] = {"model": Reduction.MEAN}
    has_noisy_steps: ClassVar[bool] = False

    @classmethod
    def proximal_steps(cls, config: RunConfig) -> ProximalSteps:
        """Return the settings of the steps on one batch."""
        method = config.section(PFedMeConfig)
        return ProximalSteps(
            learning_rate=cls.local_steps(config).learning_rate,
            pull=method.pull,
            inner_steps=method.inner_steps,
            model_learning_rate=method.model_learning_rate,
        )

    @classmethod
    def public_training(cls, config: RunConfig) -> PublicTraining:
        """Return the steps of w, each with the rate that moves it as far as one batch does."""
        steps = cls.local_steps(config)
        rate = cls.proximal_steps(config).effective_rate(steps)
        return PublicTraining(steps=replace(steps, learning_rate=rate, momentum=0.0))

    def build_groups(self) -> dict[str, nn.Module]:
        """Return the target network with the parameters w; theta is in no group."""
        self.personalized, self._is_trained = self.new_target(), False
        return super().build_groups()

    def networks(self) -> Sequence[nn.Module]:
        """Return both networks."""
        return [*super().networks(), self.personalized]

    def train(self, rng: np.random.Generator) -> dict[str, float]:
        """Train both models in place; running statistics of BatchNorm are those of the personalized one."""
        received = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.personalized.load_state_dict(received, assign=True)
        self.personalized.requires_grad_(True)
        common, steps = [parameter.detach() for parameter in self.model.parameters()], self.proximal_steps
        data, epochs = self.context.data, self.epochs()
        loss = train_pfedme(self.personalized, common, data, epochs, steps(self.context.config), rng, self.objective())
        for kept, trained in zip(self.model.buffers(), self.personalized.buffers(), strict=True):
            kept.copy_(trained)
        self._is_trained = True
        return {"train-loss": loss}

    def undo(self, received: SharedArrays, version: int) -> None:
        """Replace both models by the received one, see `BaseClient.undo`."""
        self._is_trained = False
        super().undo(received, version)

    def predictor(self) -> Target:
        """Return the personalized model; before local training the received one."""
        return self.personalized if self._is_trained else self.model

    def received_predictor(self) -> Target:
        """Return the received model."""
        return self.model

    def target_state(self) -> Mapping[str, Tensor]:
        """Return the personalized model; before local training the received one."""
        return self.predictor().state_dict()
