"""Check the network that a client has received before it is trained, see `hyperfl_flwr.privacy.received_network`."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from clients.engine.client_model import ClientModel
from clients.engine.parameter_groups import ParameterGroups
from hyperfl_flwr.core.errors import RefusalError
from hyperfl_flwr.core.files.storage import Arrays
from hyperfl_flwr.node.received_models import ReceivedModels
from hyperfl_flwr.privacy.received_network import COMPARING, Measured, ReceivedNetwork, measured_network
from hyperfl_flwr.training.local_sgd import TrainingData
from hyperfl_flwr.training.public_training import LocalSteps

MOST_SAMPLES = 200
"""Largest number of training samples that the received network is run on; of more, some at equal distances."""


class CheckedNetwork(ParameterGroups, ClientModel):
    """Checks what the server asks of a client, by the rules of the node's owner; without rules it does nothing.

    Attributes:
        round: The federated round that is trained.
    """

    round: int

    @property
    def steps(self) -> LocalSteps:
        """The local steps that train the shared parameters."""
        raise NotImplementedError

    def training_data(self) -> TrainingData:
        """Return the samples that the local steps train on."""
        raise NotImplementedError

    def least_steps(self, samples: int) -> int:
        """Return the number of local steps that an uploaded group comes from; of several groups, the smallest.

        Args:
            samples: Number of samples that the steps train on.
        """
        return self.steps.num_steps(samples)

    def least_samples(self, samples: int) -> int:
        """Return the number of samples that an uploaded group comes from; arguments as for `least_steps`."""
        return self.steps.num_used(samples)

    @property
    def is_novel(self) -> bool:
        """Whether the client is a novel one by the run's settings, which is never trained."""
        return self.context.client >= self.context.config.num_clients

    def refuse_novel(self) -> None:
        """Refuse to train a novel client.

        Raises:
            RefusalError: If the client is one.
        """
        if self.is_novel:
            raise RefusalError(
                f"client {self.context.client} is a novel client, which is never trained: trained clients have numbers "
                f"below num-clients = {self.context.config.num_clients}"
            )

    def scored_samples(self) -> list[int]:
        """Return the numbers of test and of validation samples, whose scores leave the node."""
        data = self.context.data
        return [len(data.test_labels), *([] if data.validation is None else [len(data.validation[1])])]

    def require_size(self, *, scores: bool = True) -> None:
        """Refuse to answer with fewer training samples, local steps or test samples than the owner allows.

        Samples that the run's settings hold back from training, or that no batch has, do not count. With class weights
        some samples are drawn often and others not; their effective number (sum of w)² / (sum of w²) counts. It depends
        on labels, of which a refusal would tell without noise: with an owner's `max-epsilon` all samples count. The
        settings also say which clients are novel, so a client with samples is not excepted for being one. Of test and
        validation samples the smaller number counts; without any there is no score that could be of few.

        Args:
            scores: Whether scores leave the node.

        Raises:
            RefusalError: Naming the check to the owner, but not to the server.
        """
        context = self.context
        if context.checks is None:
            return
        data = self.training_data()
        samples, weights = len(data.train_labels), data.train_weights
        drawn = samples
        is_limited = context.budget is not None and context.budget.max_epsilon is not None
        if weights is not None and samples and not is_limited:
            drawn = int(weights.sum() ** 2 / np.square(weights).sum() + 1e-9)  # equal weights may round below n
        trains = bool(len(context.data.train_labels)) or not self.is_novel
        context.checks.require_size(
            self._who(context.round),
            samples=min(drawn, self.least_samples(samples)) if trains else None,
            steps=self.least_steps(samples) if trains else None,
            tests=min((size for size in self.scored_samples() if size), default=None) if scores else None,
        )

    def check_received(self) -> None:
        """Compare the received network with the owner's rules, and keep it for the next round unless it is refused.

        The network is `received_state`: if a hypernetwork is received, the network that it generates for the client; if
        a part stays private, the whole network with that part. A client without samples or uploads is not checked, and
        nothing is kept if no rule compares networks. The check draws none of the run's random numbers and leaves the
        client unchanged.

        Raises:
            RefusalError: If a rule refuses the network; naming it to the owner, but not to the server.
            StateError: If the last received network cannot be read, or this one not be stored.
        """
        context, data = self.context, self.context.data
        if context.checks is None or not context.checks.rules:
            return
        if not (len(data.train_labels) and self.uploaded_groups()):
            return
        kept = ReceivedModels(context.state)
        last = kept.before(self.round)
        found = self._measured(_restored(*last) if last else None)
        context.checks.judge(self._who(self.round), found.measured)
        if not COMPARING.isdisjoint(context.checks.rules):
            kept.keep(self.round, {name: vector.numpy() for name, vector in found.layers.items()}, _facts(found))

    def _measured(self, last: ReceivedNetwork | None) -> ReceivedNetwork:
        data, state = self.context.data, self.received_state()
        private = [value for group in self.private for value in self.groups[group].state_dict().values()]
        own = {value.data_ptr() for value in private if not value.is_meta}  # loading has not copied them
        network = self.new_target()
        network.load_state_dict(dict(state), assign=True)
        every = math.ceil(len(data.train_labels) / MOST_SAMPLES)
        return measured_network(
            network.eval(),
            data.train_images[::every],
            data.train_labels[::every],
            received={name for name, value in state.items() if value.data_ptr() not in own},
            last=last,
            batch_size=self.steps.batch_size,
        )

    def _who(self, server_round: int) -> str:
        return f"round {server_round}: client {self.context.client}"


def _facts(found: ReceivedNetwork) -> Mapping[str, Any]:
    measured = [[each.statistic, each.value, each.layer] for each in found.measured]
    return {"dead": dict(found.dead), "loss": found.loss, "measured": measured}


def _restored(arrays: Arrays, facts: Mapping[str, Any]) -> ReceivedNetwork:
    return ReceivedNetwork(
        layers={name: torch.from_numpy(array) for name, array in arrays.items()},
        dead=facts["dead"],
        loss=facts["loss"],
        measured=[Measured(statistic=name, value=value, layer=layer) for name, value, layer in facts["measured"]],
    )
