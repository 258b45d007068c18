"""Federated rounds of a method's own clients and server without messages, also with quadratic losses."""

import os

import numpy as np
import torch
from plain import random_samples

from clients.engine.context import ClientContext
from hyperfl_flwr.app.methods import client_of, new_strategy
from hyperfl_flwr.app.resolved import resolved
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.config.table import default_settings
from hyperfl_flwr.data.federated_data import ClientData
from hyperfl_flwr.node.private_state import PrivateState
from hyperfl_flwr.protocol.messages import group_of
from hyperfl_flwr.server.federation import Federation
from hyperfl_flwr.server.handshake import Node


class Rounds:
    """The server and N clients of a method, with a small perceptron as target.

    Args:
        method: The method.
        folder: Folder for the clients' private state.
        patch: pytest's monkeypatch.
        data: Samples of each client, for training and for testing.
        num_classes: Number of classes.
        width: Units of the perceptron's two hidden layers.
        settings: Other settings.
    """

    def __init__(self, method, folder, patch, data, num_classes, width, settings):
        patch.setattr("hyperfl_flwr.models.targets.MLP_WIDTH", width)
        patch.setattr(os, "fsync", lambda _: None)
        patch.setattr(PrivateState, "forget_before", lambda *_, **__: None)
        self.folder, self.data, self.num_classes = folder, data, num_classes
        settings = {"method": method, "num-clients": len(data), "target": "mlp", "device": "cpu"} | settings
        self.config = resolved(RunConfig.from_flat(default_settings() | settings))
        self.kind = client_of(method)
        shape = {"input-shape": list(data[0].train_images.shape[1:]), "num-classes": num_classes, "num-nodes": 1}
        node = Node(id=1, partition=0, clients=list(range(len(data))), properties=shape)
        self.strategy = new_strategy(self.config, Federation([node]), experiment="0" * 16, run_directory=str(folder))
        self.sent = by_key(self.strategy.initial_parameters())
        self.versions = dict.fromkeys(range(len(data)), 0)
        self.number = 0

    def member(self, client):
        """Return a client as its node builds it for a message."""
        samples = self.data[client]
        data = ClientData(
            train_images=samples.train_images,
            train_labels=samples.train_labels,
            test_images=samples.train_images,
            test_labels=samples.train_labels,
            augmentation=samples.augmentation,
            num_classes=self.num_classes,
        )
        state = PrivateState(self.folder, "experiment", client)
        return self.kind(
            ClientContext(config=self.config, client=client, data=data, device=torch.device("cpu"), state=state)
        )

    def round(self, clients):
        """Train some clients and let the server advance; return the arrays that each client uploaded."""
        self.number += 1
        uploads, sizes = {}, {}
        for client in clients:
            member = self.member(client)
            keys = {"round": self.number, "version": self.versions[client], "kept-version": 0}
            order = member.keys()
            arrays, sizes[client], _ = member.fit([self.sent[key].copy() for key in order], keys)
            uploads[client] = dict(zip(order, arrays, strict=True))
        means = {}
        for key in self.sent:
            rule = self.kind.shared[group_of(key)]
            total = sum(rule.weight(sizes[client]) * upload[key] for client, upload in uploads.items())
            means[key] = total / rule.divisor(sum(sizes.values()), len(uploads))
        self.strategy.outcome.finished = list(clients)
        self.strategy._current = self.sent
        self.sent = self.strategy.advance(means)
        self.versions |= dict.fromkeys(clients, self.number)
        return uploads

    def private(self, client):
        """Return a client's private arrays; before its first round the initial ones."""
        member = self.member(client)
        if self.versions[client]:
            return member.context.state.load(self.versions[client])
        return by_key(member.initial_private())

    def model(self, arrays=None):
        """Return the parameters of a model as one vector, by default of the one that the server sends."""
        arrays = self.sent if arrays is None else arrays
        names = [f"model/{name}" for name, _ in self.strategy.new_target().named_parameters()]
        return np.concatenate([arrays[name].ravel() for name in names])


def by_key(groups):
    """Return tensors by group and name as arrays by `group/name`."""
    return {f"{group}/{name}": value.numpy() for group, some in groups.items() for name, value in some.items()}


class Quadratics(Rounds):
    """Clients with f_i(y) = sum over the parameters j of a_ij (y_j - b_ij)^2 / 2.

    Args:
        method: The method.
        folder: Folder for the clients' private state.
        patch: pytest's monkeypatch, which gives the method's clients these losses.
        steps: Number of local steps of each client; their losses are those of all samples in every step.
        changes: Settings.
    """

    def __init__(self, method, folder, patch, steps=(4, 4, 4, 4), **changes):
        data = [random_samples(3 * number, (1, 2, 2), 2) for number in steps]
        settings = {"batch-size": 3, "local-epochs": 1, "learning-rate": 0.1} | changes
        super().__init__(method, folder, patch, data, 2, 3, settings)
        size = sum(parameter.numel() for parameter in self.strategy.new_target().parameters())
        shape, rng = (len(steps), size), np.random.default_rng(0)
        self.a, self.b = rng.uniform(1.0, 3.0, shape), rng.normal(size=shape)
        patch.setattr(self.kind, "objective", lambda member: self._loss(member))

    def _loss(self, member):
        a, b = (torch.from_numpy(each[member.context.client]) for each in (self.a, self.b))

        def objective(images, labels):
            y = torch.cat([parameter.flatten() for parameter in member.model.parameters()])
            return (a * (y - b).square()).sum() / 2, None

        return objective

    def optimum(self, weight_decay=0.0):
        """Return the minimum of the sum over the clients of f_i + weight_decay |y|^2 / 2."""
        return (self.a * self.b).sum(axis=0) / (self.a + weight_decay).sum(axis=0)
