"""HyperFL's client: its initial state, and training with the rates of its settings."""

import pytest
import torch
from plain import HyperFLRound, digits_cnn, random_samples

from clients.engine.context import ClientContext
from clients.hyperfl import HyperFLClient
from hyperfl_flwr.app.resolved import resolved
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.config.table import default_settings
from hyperfl_flwr.data.federated_data import ClientData
from hyperfl_flwr.node.private_state import PrivateState


def client(number, tmp_path, changes):
    settings = default_settings() | {"method": "hyperfl", "device": "cpu", "learning-rate": 0.01} | changes
    config = resolved(RunConfig.from_flat(settings))
    samples = random_samples(12, (1, 8, 8), 10)
    data = ClientData(
        train_images=samples.train_images.float(),
        train_labels=samples.train_labels,
        test_images=samples.train_images.float(),
        test_labels=samples.train_labels,
        augmentation=None,
        num_classes=10,
    )
    state = PrivateState(tmp_path, "experiment", number)
    return HyperFLClient(
        ClientContext(config=config, client=number, data=data, device=torch.device("cpu"), state=state)
    )


@pytest.mark.parametrize(("embedding", "common"), [("trained", True), ("common-frozen", True), ("per-client", False)])
@pytest.mark.parametrize("initialisation", ["hyperfan-bias", "torch"])
def test_which_clients_start_from_the_same_embedding(embedding, common, initialisation, tmp_path):
    """All do (as in the paper) unless `per-client`; hyperfan's embeddings have norm 1; all share one classifier."""
    changes = {"hyperfl.embedding": embedding, "hyperfl.initialisation": initialisation}
    starts = [client(number, tmp_path, changes).initial_private() for number in (0, 1, 7)]
    vectors = [start["embedding"]["v"] for start in starts]
    for one, other in ((0, 1), (1, 2), (0, 2)):
        assert torch.equal(vectors[one], vectors[other]) is common
        for name in ("weight", "bias"):
            assert torch.equal(starts[one]["classifier"][name], starts[other]["classifier"][name])
    for v in vectors:
        assert v.shape == (64,)
        if initialisation != "torch":
            assert float(v.norm()) == pytest.approx(1, abs=1e-6)


def test_the_client_trains_with_the_rates_of_its_settings(tmp_path):
    """eta_g comes from its own key, eta_h from the run, and eta_v is eta_h if `auto`; full batch, one epoch, no decay.

    float32 against the float64 reference on the 8x8 network: the movement of each group agrees to 1e-3.
    """
    for embedding_rate, expected_rate in (("auto", 0.01), (0.05, 0.05)):
        changes = {
            "batch-size": 12,
            "local-epochs": 1,
            "momentum": 0.0,
            "weight-decay": 0.0,
            "hyperfl.embedding-dim": 6,
            "hyperfl.hidden-width": 5,
            "hyperfl.embedding-learning-rate": embedding_rate,
        }
        member = client(0, tmp_path / str(embedding_rate), changes)
        generator = torch.Generator().manual_seed(0)
        start = {
            name: torch.randn(value.shape, generator=generator) / 3
            for name, value in member.hypernetwork.state_dict().items()
        }
        keys = [key.partition("/")[2] for key in list(member.keys())]
        private = member.initial_private()
        start |= {"v": private["embedding"]["v"]}
        start |= {f"classifier.{name}": value for name, value in private["classifier"].items()}
        start = {name: value.clone() for name, value in start.items()}
        arrays, _, _ = member.fit([start[key].numpy() for key in keys], {"round": 1, "version": 0, "kept-version": 0})
        got = {key: torch.from_numpy(array) for key, array in zip(keys, arrays, strict=True)}
        stored = member.context.state.load(1)
        got |= {"v": torch.from_numpy(stored["embedding/v"])}
        got |= {f"classifier.{name}": torch.from_numpy(stored[f"classifier/{name}"]) for name in ("weight", "bias")}
        round_ = HyperFLRound(
            features=digits_cnn,
            shapes=member.hypernetwork.shapes,
            momentum=0.0,
            weight_decay=0.0,
            clip=50.0,
            classifier_rate=0.1,
            hypernetwork_rate=0.01,
            embedding_rate=expected_rate,
        )
        everything = [torch.arange(12)]
        doubles = {name: value.double() for name, value in start.items()}
        data = random_samples(12, (1, 8, 8), 10)
        wanted = round_.run(doubles, data, everything, everything)
        for name, value in wanted.items():
            movement = (value - doubles[name]).norm()
            assert movement > 0, name
            error = (got[name].double() - value).norm()
            # Small movements are lost in float32 rounding.
            assert error < 1e-3 * movement + 1e-6 * doubles[name].norm(), name
