"""PRIV-HFL's server sends no network, but it can move a client's model: to trap weights, which it then reads."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from flwr.app import ConfigRecord
from numpy.typing import NDArray

from hyperfl_flwr.app.client import app
from hyperfl_flwr.app.methods import new_strategy
from hyperfl_flwr.attacks.base import to_pixels
from hyperfl_flwr.attacks.dual_difference import read_change
from hyperfl_flwr.attacks.forging import Decoder, first_linear, normalised
from hyperfl_flwr.attacks.knowledge import PublicImages, PublicKnowledge
from hyperfl_flwr.attacks.readout import sgd_scalars
from hyperfl_flwr.attacks.scoring import compare
from hyperfl_flwr.attacks.trap_weights import forge_trap_weights
from hyperfl_flwr.audit.audit import controls, images_of
from hyperfl_flwr.audit.forged_round import public_images
from hyperfl_flwr.audit.make_round import make_attacked_round
from hyperfl_flwr.audit.options import Options
from hyperfl_flwr.audit.record_round import EXPERIMENT, AttackedRound
from hyperfl_flwr.config.table import default_settings
from hyperfl_flwr.contract.base import SMALL
from hyperfl_flwr.models.initialisation import initial_model
from hyperfl_flwr.models.targets import build_target
from hyperfl_flwr.protocol.packing import pack_arrays
from hyperfl_flwr.runs.observation import Arrays, Observation, load_observation, observation_path
from hyperfl_flwr.server.exchange import exchange
from hyperfl_flwr.server.federation import handshake
from hyperfl_flwr.server.in_process_grid import InProcessGrid
from strategies.engine.base import BaseStrategy

NUMBER = 60
"""Images of each client, of which a step has a quarter; 20 steps."""

SIZE = 10.0
"""Factor of the trap weights, with which the gradients on the way to them change them by little."""

Vector = NDArray[np.float64]


def attacked_round() -> AttackedRound:
    own = {"method": "priv-hfl", "target": "mlp", "batch-size": NUMBER // 4, "learning-rate": 0.01}
    dual = {"priv-hfl.distill": False, "priv-hfl.local-steps": 20}
    options = Options(num_images=2 * NUMBER, samples=NUMBER)
    return make_attacked_round(default_settings("priv-hfl") | SMALL | own | dual, options)


def vector(arrays: Arrays) -> Vector:
    return np.concatenate([value.ravel() for value in arrays.values()], dtype=np.float64)


def start_and_traps(target: AttackedRound, knowledge: PublicKnowledge, public: PublicImages) -> tuple[Vector, Vector]:
    """Return the model from which all clients start, and the same model with trap weights."""
    network = build_target(knowledge.target, knowledge.input_shape, knowledge.num_classes)
    start = {f"model/{name}": value.numpy() for name, value in initial_model(network, target.config.seed).items()}
    forged = dict(forge_trap_weights(start, knowledge, public, NUMBER))
    for part in ("weight", "bias"):
        forged[f"model/{first_linear(knowledge).name}.{part}"] *= SIZE
    return vector(start), vector(forged)


def client_0(strategy: BaseStrategy, grid: InProcessGrid, number: int, sent: Vector, folder: Path) -> Observation:
    """Run a round in which the server sends this S, and return what it sees of client 0."""
    arrays = pack_arrays({"changes/theta": sent.astype(np.float32)})
    messages = strategy.configure_train(number, arrays, ConfigRecord(), grid)
    strategy.reduce(exchange(grid, messages, 60.0))
    assert not strategy.outcome.failures
    return load_observation(observation_path(folder, number, 0))


@pytest.mark.parametrize("is_forged", [True, False])
def test_a_force_moves_a_client_to_trap_weights(is_forged: bool, tmp_path: Path) -> None:
    """Of 60 digits in 20 steps the round after shows more than half; without the force, fewer than a fifth."""
    target = attacked_round()
    config, knowledge, public = target.config, target.knowledge(), public_images(target)
    grid = InProcessGrid(app, 1, config.flat(), {"simulated": True})
    federation = handshake(grid, config.hosted_clients, 10.0)
    strategy = new_strategy(config, federation, experiment=EXPERIMENT, run_directory=str(tmp_path))
    start, traps = start_and_traps(target, knowledge, public)
    kept, weights = sgd_scalars(knowledge.steps, knowledge.num_steps(NUMBER))
    dual = knowledge.training.dual
    assert dual is not None
    force = (traps - kept * start) / weights.sum()  # a constant gradient with which the steps end at the trap weights
    first = client_0(strategy, grid, 1, -force / (2 * dual.rule.step) * is_forged, tmp_path)
    moved = first.reply["changes/theta"].astype(np.float64)
    if is_forged:
        assert np.linalg.norm(start + moved - traps) < 1e-2 * np.linalg.norm(traps - start)
    second = client_0(strategy, grid, 2, moved, tmp_path)  # S = A: no force
    readout = read_change(replace(second, earlier=[first]), knowledge)
    layer = first_linear(knowledge)
    rows = layer.rows(readout)
    decoder = Decoder(layer, readout.parameters, normalised(public.images, knowledge))
    found = to_pixels(decoder.images(rows[:, :-1] / rows[:, -1:]), knowledge)
    private, _ = images_of(target, 0)
    recovered = compare(found, private, *controls(target, len(found))).recovered.sum()
    assert recovered > NUMBER / 2 if is_forged else recovered < NUMBER / 5
