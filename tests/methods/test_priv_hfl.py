"""PRIV-HFL with real messages: forces against a float64 reference, zero sums, both realisations, message sizes."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from clients.priv_hfl import PrivHFLClient
from hyperfl_flwr.app.resolved import resolved
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.config.table import default_settings
from hyperfl_flwr.contract.base import Federate
from hyperfl_flwr.contract.folders import last_checkpoint, metrics, outcome, private_arrays
from hyperfl_flwr.contract.grids import KilledError, KilledGrid, RecordingGrid, Settings
from hyperfl_flwr.contract.leaks import leaks
from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.core.files.storage import read_arrays
from hyperfl_flwr.core.rng import torch_generator
from hyperfl_flwr.data.federated_data import load_federated_data
from hyperfl_flwr.launch.planning import plan
from hyperfl_flwr.methods.priv_hfl import PrivHFLConfig
from hyperfl_flwr.models.generator import kept_generators
from hyperfl_flwr.models.initialisation import ordinary_parameters
from hyperfl_flwr.models.targets import build_target
from hyperfl_flwr.runs.checkpoint import Checkpoints
from hyperfl_flwr.runs.run_directory import read_manifest
from hyperfl_flwr.runs.target_accuracy import target_text
from hyperfl_flwr.training.dual_stability import dual_rule

ALONE = {"priv-hfl.distill": False}
CHAIN = {"priv-hfl.realisation": "chain", **ALONE}
FOUR: dict[str, Any] = {
    "num-clients": 4, "data.partition": "iid", "data.train-samples": 100, "data.test-samples": 50, **ALONE,
}  # fmt: skip


def model_vector(arrays: dict[str, np.ndarray]) -> np.ndarray:
    """Return a client's stored model as one vector in float64, in the order of the network's parameters."""
    names = [name for name, _ in build_target("cnn", (1, 8, 8), 10).named_parameters()]
    return np.concatenate([arrays[f"model/{name}"].ravel() for name in names]).astype(np.float64)


def start_vector() -> np.ndarray:
    values = ordinary_parameters(build_target("cnn", (1, 8, 8), 10), torch_generator(0, "model"))
    return torch.cat([value.flatten() for value in values.values()]).double().numpy()


def history(run: Path) -> dict[int, dict[int, dict[str, np.ndarray]]]:
    """Return all stored versions as client -> round -> arrays."""
    found: dict[int, dict[int, dict[str, np.ndarray]]] = {}
    for name, arrays in private_arrays(run).items():
        client, version = (int("".join(filter(str.isdigit, part))) for part in Path(name.removesuffix(".npz")).parts)
        found.setdefault(client, {})[version] = arrays
    return found


def keep_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hyperfl_flwr.node.private_state.PrivateState.forget_before", lambda *_, **__: None)
    monkeypatch.setattr("hyperfl_flwr.runs.checkpoint.KEPT", 99)


def lose_replies(monkeypatch: pytest.MonkeyPatch, lost: set[tuple[int, int]]) -> None:
    """Patch the clients so that the given (client, round) train and store, but fail before they reply."""
    fit = PrivHFLClient.fit

    def failing(self: PrivHFLClient, parameters: list[np.ndarray], config: dict[str, Any]) -> Any:
        reply = fit(self, parameters, config)
        if (self.context.client, config["round"]) in lost:
            raise RuntimeError("the line is cut")
        return reply

    monkeypatch.setattr(PrivHFLClient, "fit", failing)


def record_forces(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, int], np.ndarray]:
    """Return a dictionary that is filled with the force of every (round, client)."""
    forces: dict[tuple[int, int], np.ndarray] = {}
    steps = PrivHFLClient._local_steps

    def recorded(self: PrivHFLClient, force: torch.Tensor, rng: np.random.Generator, pseudo: Any = None) -> float:
        forces[self.round, self.context.client] = force.double().numpy()
        return steps(self, force, rng, pseudo)

    monkeypatch.setattr(PrivHFLClient, "_local_steps", recorded)
    return forces


def counted_models(run: Path, number: int) -> np.ndarray:
    """Return the models [N, m] that the server has counted up to a round."""
    stored, (_, progress) = history(run), Checkpoints(run / "checkpoints").load(number)
    return np.stack([model_vector(stored[i][v]) if v else start_vector() for i, v in sorted(progress.versions.items())])


def multipliers(run: Path, number: int) -> np.ndarray:
    """Return mu_i [N, m] for the next round, from the clients' files and the array that the server sends."""
    config = resolved(RunConfig.from_flat(read_manifest(run)["settings"]))
    stored, (arrays, progress) = history(run), Checkpoints(run / "checkpoints").load(number)
    rule, start = dual_rule(config.section(PrivHFLConfig)), torch.from_numpy(start_vector())
    nothing, rows = torch.zeros_like(start), []
    for client, version in sorted(progress.versions.items()):
        files = stored[client][version] if version else None
        theta = start if files is None else torch.from_numpy(model_vector(files))
        total = nothing if files is None else torch.from_numpy(files["accumulated/theta"])
        total = rule.accumulated(total, theta, number - version) - rule.accumulated(nothing, start, number)
        rows.append(2 * rule.step * (total.numpy() - arrays["changes/theta"]))
    return np.stack(rows)


SAMPLED = {**FOUR, "fraction_train": 0.5, "num_rounds": 8, "checkpoint_every": 1, "failure_budget": 1.0}


@pytest.mark.parametrize("order", ["alternating", "published"])
@pytest.mark.parametrize(("realisation", "sigma"), [("mean", 0.0), ("mean", 0.5), ("chain", 0.5)])
def test_the_forces_are_those_of_the_models_that_were_counted(
    realisation: str, order: str, sigma: float, federate: Federate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forces are C^T mu with mu <- D mu + 2 beta C theta in float64; half of four clients a round, one lost reply.

    The client with the lost reply has stored that round, but restarts from the version before. In the mean form the
    multipliers of all clients sum to zero after every round.
    """
    keep_versions(monkeypatch)
    plan = SAMPLED | {"priv-hfl.order": order, "priv-hfl.realisation": realisation}
    plan |= {"priv-hfl.sigma": sigma, "priv-hfl.dual-step": 0.4}
    lost = min(client for client, versions in history(federate("priv-hfl", **plan)).items() if 3 in versions)
    lose_replies(monkeypatch, {(lost, 3)})
    forces = record_forces(monkeypatch)
    run = federate("priv-hfl", **plan)
    assert [row["failed"] for row in metrics(run) if row["kind"] == "train"] == [[], [], [lost], [], [], [], [], []]
    assert 3 in history(run)[lost]
    matrix, decay, largest = incidence(realisation, 4), 1 - sigma * 0.4**2, 0.0
    models = older = np.tile(start_vector(), (4, 1))
    expected = np.zeros((len(matrix), models.shape[1]))
    for number in range(1, 9):
        expected = decay * expected + 2 * 0.4 * matrix @ (models if order == "alternating" else older)
        for client in range(4):
            if (number, client) in forces:
                np.testing.assert_allclose(forces[number, client], (matrix.T @ expected)[client], atol=5e-6)
                largest = max(largest, float(np.abs(forces[number, client]).max()))
        older, models = models, counted_models(run, number)
        if realisation == "mean":
            arrays, _ = Checkpoints(run / "checkpoints").load(number)
            np.testing.assert_allclose(arrays["server/consensus"], models.mean(axis=0) - start_vector(), atol=1e-6)
            if order == "alternating":
                assert np.abs(multipliers(run, number).sum(axis=0)).max() < 5e-6
    assert largest > 1e-2


def incidence(realisation: str, num_clients: int) -> np.ndarray:
    if realisation == "mean":
        return np.eye(num_clients) - 1 / num_clients
    return np.eye(num_clients)[:-1] - np.eye(num_clients, k=1)[:-1]


def test_a_round_without_replies_is_a_round(federate: Federate, monkeypatch: pytest.MonkeyPatch) -> None:
    """All clients fail in round 2: after round 3 the multipliers are those of three steps and still sum to zero."""
    keep_versions(monkeypatch)
    lose_replies(monkeypatch, {(client, 2) for client in range(4)})
    run = federate(
        "priv-hfl", **{**FOUR, "num_rounds": 3, "checkpoint_every": 1, "failure_budget": 1.0, "priv-hfl.sigma": 0.0}
    )
    step = dual_rule(resolved(RunConfig.from_flat(read_manifest(run)["settings"])).priv_hfl).step
    first, last = counted_models(run, 1), counted_models(run, 3)
    assert np.array_equal(first, counted_models(run, 2))
    expected = 2 * step * sum(models - models.mean(axis=0) for models in (first, first, last))
    got = multipliers(run, 3)
    np.testing.assert_allclose(got, expected, atol=5e-6)
    assert np.abs(got.sum(axis=0)).max() < 5e-6
    assert np.abs(got).max() > 1e-3


@pytest.mark.parametrize("realisation", ["mean", "chain"])
def test_the_generator_waits_in_a_round_without_replies(
    realisation: str, federate: Federate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All clients fail in round 2: the generator stays; kept generators equal those of the checkpoints."""
    keep_versions(monkeypatch)
    lose_replies(monkeypatch, {(client, 2) for client in range(4)})
    plan = FOUR | {"num_rounds": 3, "checkpoint_every": 1, "failure_budget": 1.0, "priv-hfl.keep-generators": 1}
    run = federate("priv-hfl", **plan | {"priv-hfl.distill": True, "priv-hfl.realisation": realisation})
    after = {}
    for number, path in kept_generators(run).items():
        arrays, _ = Checkpoints(run / "checkpoints").load(number)
        after[number], _ = read_arrays(path)
        assert {f"generator/{name}" for name in after[number]} == {key for key in arrays if "generator/" in key}
        assert all(np.array_equal(value, arrays[f"generator/{name}"]) for name, value in after[number].items())
    assert sorted(after) == [1, 2, 3]
    assert all(np.array_equal(value, after[2][name]) for name, value in after[1].items())
    assert not np.array_equal(after[2]["noise.weight"], after[3]["noise.weight"])


def test_what_is_clipped_and_noised_is_what_counts(federate: Federate, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client continues from the model the server counts: each change has the clip norm, noise included."""
    keep_versions(monkeypatch)
    plan = {**FOUR, "num_rounds": 2, "checkpoint_every": 1, "privacy.clip-norm": 0.005}
    run = federate("priv-hfl", **plan)
    start = np.tile(start_vector(), (4, 1))
    one, two = counted_models(run, 1), counted_models(run, 2)
    for before, after in ((start, one), (one, two)):
        np.testing.assert_allclose(np.linalg.norm(after - before, axis=1), 0.005, rtol=1e-3)
    noisy = federate("priv-hfl", **plan, **{"privacy.noise-multiplier": 0.1})
    change = counted_models(noisy, 1) - start
    assert change.std(axis=1) == pytest.approx(0.0005, rel=0.05)
    server, _ = Checkpoints(noisy / "checkpoints").load(1)
    np.testing.assert_allclose(server["server/consensus"], change.mean(axis=0), atol=1e-7)


def test_both_realisations_learn_alike(federate: Federate) -> None:
    """After ten rounds both exceed 0.8 accuracy and differ by less than 0.05; messages are as large as FedAvg's."""
    plan = {**FOUR, "num_rounds": 10, "priv-hfl.local-steps": 15, "local-epochs": 3, "learning-rate": 0.05}
    plan |= {"data.train-samples": 300, "data.test-samples": 100}
    runs = {"mean": federate("priv-hfl", **plan), "chain": federate("priv-hfl", **plan | CHAIN)}
    fedavg = federate("fedavg", **plan | {"num_rounds": 1})
    found = {name: json.loads((run / "summary.json").read_text()) for name, run in (runs | {"fedavg": fedavg}).items()}
    accuracies = {name: found[name]["test_accuracy"] for name in runs}
    assert min(accuracies.values()) > 0.8, accuracies
    assert max(accuracies.values()) - min(accuracies.values()) < 0.05, accuracies
    for name in ("mean", "chain"):
        for way in ("bytes_up_per_client_round", "bytes_down_per_client_round"):
            assert found[name][way] == found["fedavg"][way]


@pytest.mark.parametrize("distill", [False, True])
def test_a_killed_chain_goes_on_as_if_nothing_had_happened(distill: bool, federate: Federate) -> None:
    """The chain, killed in round 4 and resumed, equals a straight run, as the contract tests ask of the mean."""
    plan: dict[str, Any] = {**CHAIN, "num_rounds": 5, "fraction_train": 0.5, "checkpoint_every": 2}
    plan["priv-hfl.distill"] = distill
    straight = federate("priv-hfl", **plan)
    plan["output"] = str(straight.parent / "run-111")
    with pytest.raises(KilledError):
        federate("priv-hfl", grid=partial(KilledGrid, in_round=4), **plan)
    assert outcome(federate("priv-hfl", resume=plan["output"], **plan)) == outcome(straight)


def test_a_chain_sends_no_model(federate: Federate) -> None:
    """No 16 bytes of a stored model occur in a message; the server keeps two arrays of (N - 1) m numbers."""
    grids: list[RecordingGrid] = []

    def make(num_nodes: int, settings: Settings) -> RecordingGrid:
        grids.append(RecordingGrid(num_nodes, settings))
        return grids[-1]

    run = federate("priv-hfl", grid=make, **CHAIN)
    models = {f"{file}:{key}": value.tobytes() for file, a in private_arrays(run).items() for key, value in a.items()}
    assert {key.rpartition(":")[2].partition("/")[0] for key in models} == {"model"}
    assert leaks(models, {str(number): data for number, data in enumerate(grids[0].sent)}) == []
    arrays, _ = last_checkpoint(run)
    assert {key: value.shape for key, value in arrays.items()} == {
        "server/residuals": (4, len(start_vector())),
        "server/multipliers": (1, 4, len(start_vector())),
    }


def test_warnings_come_before_the_run_and_are_in_its_log(federate: Federate, tmp_path: Path) -> None:
    """The published order without a safe step is warned of; the default settings give no warning."""
    settings = {"method": "priv-hfl", "output": str(tmp_path / "run")}
    assert plan(settings, 1).warnings == []
    (warning,) = plan(settings | {"priv-hfl.order": "published"}, 1).warnings
    assert "set priv-hfl.order = alternating" in warning
    assert "warning:" not in (federate("priv-hfl") / "server.log").read_text()
    log = (federate("priv-hfl", **{"priv-hfl.order": "published"}) / "server.log").read_text()
    assert "warning: with priv-hfl.order = published" in log


def test_a_chain_does_not_depend_on_the_number_of_nodes(federate: Federate) -> None:
    """Results on 1, 2 and 5 nodes are bit-equal, as arrays travel per client and are added in client order."""
    runs = [federate("priv-hfl", nodes, **CHAIN) for nodes in (1, 2, 5)]
    first, *others = [outcome(run) for run in runs]
    for other in others:
        for part in ("arrays", "private", "accuracies"):
            assert other[part] == first[part]


@pytest.mark.parametrize("changes", [{}, {"priv-hfl.mixing": True}, {"fraction_train": 0.5}], ids=str)
def test_the_mean_model_is_evaluated_after_the_last_round(changes: dict[str, Any], federate: Federate) -> None:
    """The run's `aggregate` accuracy is that of theta(0) + mean change on the clients' test data."""
    run = federate("priv-hfl", **FOUR | {"num_rounds": 5, "learning-rate": 0.05, "priv-hfl.local-steps": 8} | changes)
    models = counted_models(run, 5)
    config = resolved(RunConfig.from_flat(read_manifest(run)["settings"]))
    target = build_target("cnn", (1, 8, 8), 10)
    target.load_state_dict(ordinary_parameters(target, torch_generator(0, "model")), assign=True)
    data, expected = load_federated_data(config.data_settings()), []
    for vector in (models.mean(axis=0), models[0]):
        torch.nn.utils.vector_to_parameters(torch.from_numpy(vector).float(), target.parameters())
        clients = [data.client(client) for client in range(4)]
        hits = [(target(each.test_images).argmax(dim=1) == each.test_labels).double().mean() for each in clients]
        expected.append(float(torch.stack(hits).mean()))
    got = json.loads((run / "summary.json").read_text())["test_accuracy_aggregate"]
    assert got == pytest.approx(expected[0], abs=0.006)  # one image of 200 may be on a class boundary
    assert abs(got - expected[1]) > 0.006


SKEWED: dict[str, Any] = {**FOUR, "data.partition": "dirichlet", "data.dirichlet-alpha": 0.3, "target-accuracy": 0.01}


def aggregates(run: Path) -> dict[int, float]:
    return {row["round"]: row["aggregate_loss"] for row in metrics(run) if row["kind"] == "aggregate"}


@pytest.mark.parametrize("mixing", [False, True])
def test_with_the_mean_all_rounds_measure_the_mean_model(federate: Federate, mixing: bool) -> None:
    """After each round it is what the last evaluation of a shorter run measures, and training is the same."""
    given: dict[str, Any] = {**SKEWED, "priv-hfl.mixing": mixing}
    whole = federate("priv-hfl", num_rounds=3, **given, **{"priv-hfl.send-mean": True})
    plain = {number: federate("priv-hfl", num_rounds=number, **given) for number in (1, 2, 3)}
    found = aggregates(whole)
    for number, run in plain.items():
        assert found[number] == pytest.approx(aggregates(run)[number], rel=1e-5)
    assert aggregates(plain[3])[1] != pytest.approx(found[1], rel=1e-2)
    trained = [
        [row["personalized_loss"] for row in metrics(run) if row["kind"] == "train"] for run in (whole, plain[3])
    ]
    assert trained[0] == trained[1]
    with_mean, without = (json.loads((run / "summary.json").read_text()) for run in (whole, plain[3]))
    down = "bytes_down_per_client_round"
    assert with_mean[down] == 2 * without[down]
    numbers = ("rounds_to_target_aggregate", "best_round_aggregate", "best_accuracy_aggregate")
    assert None not in [with_mean[name] for name in numbers]
    assert [without[name] for name in numbers] == [None] * 3
    texts = [
        target_text(read_manifest(run)["settings"], found) for run, found in ((whole, with_mean), (plain[3], without))
    ]
    assert ["aggregate" in text for text in texts] == [True, False]
    assert with_mean["rounds_to_target_aggregate"] == min(
        row["round"] for row in metrics(whole) if row["kind"] == "aggregate" and row["aggregate_accuracy"] >= 0.01
    )


def test_the_best_rounds_keep_the_last_mean_model(federate: Federate) -> None:
    """The lines before the last evaluation are of the clients' own models, which choose no mean model."""
    chosen: dict[str, Any] = {**FOUR, "keep": "best", "data.validation-fraction": 0.2}
    run = federate("priv-hfl", num_rounds=3, **chosen)
    summary = json.loads((run / "summary.json").read_text())
    last = [row for row in metrics(run) if row["kind"] == "aggregate"][-1]
    assert (last["round"], summary["best_validation_round_aggregate"]) == (3, None)
    assert summary["test_accuracy_aggregate"] == last["aggregate_accuracy"]


def test_the_chain_has_no_mean_to_send() -> None:
    with pytest.raises(ConfigError, match=r"needs priv-hfl\.realisation = mean"):
        RunConfig.from_flat(default_settings("priv-hfl") | {**CHAIN, "priv-hfl.send-mean": True})
