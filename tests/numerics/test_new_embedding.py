"""The embedding of a client that joins, against gradient descent written out; the hypernetwork is constant."""

import torch
from plain import Sgd
from torch import nn

from hyperfl_flwr.core.rng import torch_generator
from hyperfl_flwr.models.new_embedding import NewEmbedding
from hyperfl_flwr.models.server_hypernetwork import DeepHypernetwork, ServerHypernetwork, ServerRates

RATES = ServerRates(
    learning_rate=9.0, momentum=0.9, weight_decay=9.0, clip_norm=0.2, embedding_learning_rate=0.3,
    embedding_weight_decay=0.01,
)  # fmt: skip


def theta_of(values, v):
    """Return the flat network of an embedding: the MLP and the heads, written out."""
    hidden = (values["body.0.weight"] @ v + values["body.0.bias"]).clamp(min=0)
    hidden = values["body.2.weight"] @ hidden + values["body.2.bias"]
    return hidden @ values["head_weight"] + values["head_bias"]


def test_steps_descend_on_the_embedding_alone():
    """Three steps along <delta, theta(v)>: clipped, with the embeddings' rate, decay and momentum; in float64."""
    with torch.device("meta"):
        network = DeepHypernetwork(nn.Linear(4, 3), embedding_dim=5, hidden_width=16, hidden_layers=1)
    server = ServerHypernetwork({"a": network}, ["a"], 4, RATES, torch_generator(0, "pfedhn"))
    for parameter in (server.embeddings, *network.parameters()):
        parameter.data = parameter.data.double()
    values = {name: value.clone() for name, value in server.state().items()}
    start = server.embeddings.mean(dim=0)
    one, v, optimiser = NewEmbedding(network, start, RATES), {"v": start.detach()}, Sgd(0.3, 0.9, 0.01, 0.2)
    for step in range(3):
        generated = torch.cat([value.flatten() for value in one.generate().values()])
        torch.testing.assert_close(generated, theta_of(values, v["v"]), rtol=1e-12, atol=1e-12)
        draw = torch_generator(step, "change")
        change = {
            name: torch.randn(shape, generator=draw, dtype=torch.float64) for name, shape in network.shapes.items()
        }
        one.update(change)
        leaf = {"v": v["v"].detach().requires_grad_()}
        product = theta_of(values, leaf["v"]) @ torch.cat([value.flatten() for value in change.values()])
        v = optimiser.step(leaf, product, ["v"])
        torch.testing.assert_close(one.embedding.detach(), v["v"].detach(), rtol=1e-9, atol=1e-12)
    assert float((one.embedding - start).detach().norm()) > 0.05
    for name, value in server.state().items():
        assert torch.equal(value, values[name]), name
    assert all(parameter.grad is None for parameter in network.parameters())
