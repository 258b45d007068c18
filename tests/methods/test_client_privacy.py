"""Differential privacy of whole clients: how much noise is in what is released, and what is stated about it."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from federations import small_settings
from flwr.app import Message, MessageType
from noisy_clients import CLIPPED, NODES, SUM, C, N, Z, arrays_of, lines, noisy
from test_secure_runs import dropping

from clients.engine.protected_upload import client_release, protected_upload
from clients.fedavg import FedAvgClient
from hyperfl_flwr.app.client import app
from hyperfl_flwr.app.methods import client_of
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.contract.base import Federate
from hyperfl_flwr.contract.folders import last_checkpoint, metrics, private_arrays
from hyperfl_flwr.contract.grids import Settings
from hyperfl_flwr.core.errors import ConfigError, RunFailedError
from hyperfl_flwr.methods import METHODS
from hyperfl_flwr.privacy.release import Release
from hyperfl_flwr.protocol.messages import Reduction
from hyperfl_flwr.protocol.packing import pack_arrays, unpack_arrays
from hyperfl_flwr.protocol.secure_sums.messages import UNMASK
from hyperfl_flwr.runs.failures import read_failures
from hyperfl_flwr.runs.observation import load_observation, observation_path
from hyperfl_flwr.server.in_process_grid import InProcessGrid


def difference(one: Path, other: Path) -> np.ndarray:
    """Return the difference of the shared parameters of two runs, as a vector."""
    arrays, others = arrays_of(one), arrays_of(other)
    return np.concatenate([(value.astype(float) - others[key]).ravel() for key, value in arrays.items()])


@pytest.mark.parametrize(
    ("noise", "changes", "expected"),
    [
        ("server", {}, Z * C / N),
        ("local", {}, Z * C / math.sqrt(N)),
        ("local", {"secagg.enabled": True}, Z * C / math.sqrt(N)),
        ("sum", {}, Z * C / N * math.sqrt(4 / 3)),  # 4 nodes, one of which may collude: 3 shares must suffice
        ("sum", {"secagg.colluding": 2, "secagg.min-cohort": 2}, Z * C / N * math.sqrt(4 / 2)),
    ],
)
def test_the_mean_has_the_noise(noise: str, changes: Settings, expected: float, federate: Federate) -> None:
    """Measured against the same clipped round without noise, within 2 percent; the metrics of the round have none."""
    run = federate("fedavg", NODES, **noisy(noise, **changes))
    clean = federate(
        "fedavg", NODES, **CLIPPED | {"secagg.enabled": noisy(noise, **changes).get("secagg.enabled", False)}
    )
    moved = difference(run, clean)
    assert moved.size > 20_000  # so that 2 percent are four standard errors
    assert moved.std() == pytest.approx(expected, rel=0.02)
    assert abs(moved.mean()) < 6 * expected / math.sqrt(moved.size)
    rows = [next(row for row in metrics(path) if row["kind"] == "train") for path in (run, clean)]
    assert rows[0]["personalized_accuracy"] == rows[1]["personalized_accuracy"]
    assert rows[0].get("saturated", 0) == 0


@pytest.mark.parametrize(("lost", "kind"), [((2,), MessageType.TRAIN), ((5, 1), MessageType.TRAIN), ((3,), UNMASK)])
def test_drop_outs_leave_enough_noise(lost: tuple[int, ...], kind: str, federate: Federate) -> None:
    """Of eight nodes, six must answer, and two may collude: the noise that is left suffices for any sum."""
    secure = {"secagg.enabled": True, "failure-budget": 1.0}
    run = federate("fedavg", 8, grid=dropping(lost, kind), **noisy("sum") | secure)
    clean = federate("fedavg", 8, grid=dropping(lost, kind), **CLIPPED | secure)
    present = 8 - len(lost) * (kind == MessageType.TRAIN)
    (line,) = lines(run)
    assert line["crowd"] == 3
    moved = difference(run, clean)
    assert moved.std() == pytest.approx(Z * C / present * math.sqrt(present / 3), rel=0.02)
    assert moved.std() >= 0.98 * Z * C / present


def test_a_sum_with_hardly_any_noise_is_the_plain_mean(federate: Federate) -> None:
    """Encoding with one scale for all arrays: the mean change differs by less than 10^-3 of its norm."""
    changes = {"privacy.clip-norm": 0.01, "target": "mlp"}
    run = federate("fedavg", NODES, **noisy("sum", **{"privacy.noise-multiplier": 1e-5}) | changes)
    clean, start = (federate("fedavg", NODES, **CLIPPED | changes | {"learning-rate": rate}) for rate in (0.1, 1e-30))
    assert np.linalg.norm(difference(run, clean)) < 1e-3 * np.linalg.norm(difference(clean, start))


@pytest.mark.parametrize("noise", ["local", "server"])
def test_no_method_can_leave_out_the_protection(
    noise: str, federate: Federate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A method with a reply of its own, which returns the trained arrays: the engine clips it and adds the noise."""
    monkeypatch.setattr(FedAvgClient, "reply", lambda self, received, trained: trained)
    norm = 0.02
    run = federate("fedavg", **noisy(noise, **{"audit.clients": "all", "audit.rounds": "1", "privacy.clip-norm": norm}))
    for client in range(N):
        seen = load_observation(observation_path(run, 1, client))
        moved = np.concatenate(
            [(value.astype(float) - seen.received[key]).ravel() for key, value in seen.reply.items()]
        )
        if noise == "local":
            assert moved.std() == pytest.approx(Z * norm, rel=0.03)
        else:
            assert 0.999 * norm < np.linalg.norm(moved) <= norm


def test_every_client_has_the_same_bounded_weight(federate: Federate) -> None:
    """Clients of different sizes: what each sends has a norm of at most C, and the result is the plain mean of it."""
    sizes = {"data.partition": "dirichlet-per-label", "data.train-samples": "auto"}
    run = federate(
        "fedavg", **CLIPPED | sizes | {"audit.clients": "all", "audit.rounds": "1", "privacy.clip-norm": 0.2}
    )
    uploads = [load_observation(observation_path(run, 1, client)) for client in range(N)]
    assert len({upload.num_examples for upload in uploads}) > 1
    for upload in uploads:
        squares = [np.sum((value.astype(float) - upload.received[key]) ** 2) for key, value in upload.reply.items()]
        assert 0.999 * 0.2 < math.sqrt(sum(squares)) <= 0.2
    for key, value in arrays_of(run).items():
        np.testing.assert_allclose(value, np.mean([upload.reply[key] for upload in uploads], axis=0), atol=1e-6)


@pytest.mark.parametrize("changes", [{}, {"keep": "best", "data.validation-fraction": 0.25}])
@pytest.mark.parametrize("method", ["fedavg", "fedrep", "fedala", "ditto", "hyperfl", "pfedme", "per-fedavg"])
def test_a_client_that_diverges_finishes_without_a_change(method: str, changes: Settings, federate: Federate) -> None:
    """A failure would say, without noise, what training gave; shared and private values are those from before."""
    settings = CLIPPED | {"num_rounds": 2, "local-epochs": 3} | changes
    run = federate(method, NODES, **settings | {"learning-rate": 1e14 if method == "hyperfl" else 1e38})
    still = federate(method, NODES, **settings | {"learning-rate": 1e-30})
    assert [(row["clients"], row["failed"]) for row in metrics(run) if row["kind"] == "train"] == [(N, [])] * 2
    found, expected = arrays_of(run), arrays_of(still)
    for key, value in expected.items():
        np.testing.assert_allclose(found[key], value, rtol=1e-6, atol=1e-7, err_msg=key)
    assert all(np.isfinite(value).all() for arrays in private_arrays(run).values() for value in arrays.values())


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_reply_that_is_not_finite_is_replaced_by_no_change(value: float) -> None:
    """A method's own reply may overflow where the trained parameters do not."""
    privacy = RunConfig.from_flat(small_settings() | {"privacy.unit": "client", "privacy.clip-norm": 1.0}).privacy
    received, reply = [np.ones(3, np.float32), np.ones(2)], [np.full(3, 0.5, np.float32), np.array([0.5, value])]
    for before, sent in zip(received, protected_upload(privacy, received, reply), strict=True):
        np.testing.assert_array_equal(sent, before)


@pytest.mark.parametrize("noise", ["local", "sum"])
def test_a_share_of_the_mean_change_is_applied(noise: str, federate: Federate) -> None:
    """`privacy.server-rate` scales the change, here with hardly any noise."""
    tiny = {"privacy.noise-multiplier": 2e-5 if noise == "sum" else 1e-7, "target": "mlp"}
    full, start, part = (
        federate("fedavg", NODES, **noisy(noise, **tiny, **changes))
        for changes in ({}, {"learning-rate": 1e-30}, {"privacy.server-rate": 0.3})
    )
    expected = 0.3 * difference(full, start)
    assert np.linalg.norm(difference(part, start) - expected) < 0.05 * np.linalg.norm(expected)


@pytest.mark.parametrize("method", METHODS)
def test_weights_are_equal(method: str) -> None:
    """Only the reduction by numbers of samples changes, and only with `privacy.unit=client`."""
    config = RunConfig.from_flat(small_settings(method=method))
    client = client_of(method)
    assert client.reductions(config) == client.shared
    config = RunConfig.from_flat(small_settings(method=method) | {"privacy.unit": "client"})
    found = client.reductions(config)
    assert found.keys() == client.shared.keys()
    assert Reduction.MEAN_BY_EXAMPLES not in found.values()
    for group, reduction in client.shared.items():
        assert found[group] in (reduction, Reduction.MEAN)


BATCHNORM = "own_networks:with_batchnorm"
OBFUSCATION: Settings = {"privacy.unit": "none", "privacy.noise": "local"}


@pytest.mark.parametrize(
    ("method", "changes", "problem"),
    [
        ("pfedhn", {}, "its model are not averaged"),
        ("pfedhn-pc", {}, "so noise on a mean does not protect them; take one of "),
        ("it-pfl", {}, "privacy.unit must be none with it-pfl: its model, embedding"),
        ("priv-hfl", {}, "privacy.unit must be none with priv-hfl: its changes, force"),
        ("local", {}, "its clients upload nothing"),
        ("fedavg", {"target": BATCHNORM}, "privacy.noise-multiplier must be 0 with target = own_networks"),
        ("fedavg", OBFUSCATION | {"target": BATCHNORM}, "its BatchNorm uploads variances, which noise makes negative"),
        ("fedavg", {"privacy.clip-norm": 0.0, "privacy.noise-multiplier": 0.0}, "privacy.clip-norm must be above 0"),
        ("fedavg", {"privacy.noise-multiplier": 0.0}, "to study clipping without noise, take privacy.noise=local"),
        ("fedavg", {"privacy.noise": "sum"}, "set secagg.enabled=true, or privacy.noise to server or local"),
        ("fedavg", {"secagg.enabled": True}, "privacy.noise must not be server with secagg.enabled"),
    ],
)
def test_what_cannot_hold_is_refused(
    method: str, changes: Settings, problem: str, federate: Federate, tmp_path: Path
) -> None:
    """The error names setting, reason and way out; nothing is written."""
    with pytest.raises(ConfigError, match=problem.replace(".", r"\.")):
        federate(method, NODES, **noisy("server", target="mlp") | changes)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("changes", [{}, OBFUSCATION], ids=["server", "without a unit"])
def test_running_statistics_that_stay_on_the_client_get_no_noise(changes: Settings, federate: Federate) -> None:
    run = federate("fedbn", NODES, **noisy("server", target=BATCHNORM) | changes)
    sent = last_checkpoint(run)[0]
    assert sent
    assert not any("running_" in key for key in sent)


def test_nodes_refuse_noise_that_does_not_suffice(federate: Federate, tmp_path: Path) -> None:
    """With z = 10^-8 a share is less than 1000 units of the sum; the nodes say so before they train."""
    with pytest.raises(RunFailedError):
        federate("fedavg", NODES, **noisy("sum", **{"target": "mlp", "privacy.noise-multiplier": 1e-8}))
    (run,) = tmp_path.iterdir()
    reasons = {failure.reason for failure in read_failures(run)}
    assert all("is too small for noise=sum" in reason for reason in reasons)
    assert reasons


def test_noise_is_no_change_that_is_too_long(federate: Federate) -> None:
    """Noise of 25 times the norm of the parameters passes `max-update-ratio`; without unit=client, too."""
    for unit in ("client", "none"):
        run = federate("fedavg", **noisy("local", **{"target": "mlp", "privacy.unit": unit, "max-update-ratio": 1.0}))
        assert read_failures(run) == []


class MalformedGrid(InProcessGrid):
    """Node 1 replies with an element of 2^66, below which smaller changes are rounded away or carried over."""

    def answer(self, message: Message) -> Message:
        reply = super().answer(message)
        if message.metadata.message_type == MessageType.TRAIN and message.metadata.dst_node_id == 1001:
            arrays = {key: np.array(value) for key, value in unpack_arrays(reply.content["arrays"]).items()}
            arrays["model/classifier.bias"][0] = 2.0**66
            reply.content["arrays"] = pack_arrays(arrays)
        return reply


def test_a_reply_that_would_round_away_the_others_is_refused(federate: Federate) -> None:
    """With noise from the server, also where `max-update-ratio` allows any change."""
    plan = noisy("server", **{"max-update-ratio": 0.0, "failure-budget": 1.0, "target": "mlp"})

    def grid(num_nodes: int, settings: Settings) -> MalformedGrid:
        return MalformedGrid(app, num_nodes, settings, {"simulated": True})

    run = federate("fedavg", N, grid=grid, **plan)
    assert [failure.client for failure in read_failures(run)] == [1]
    assert max(np.abs(value).max() for value in arrays_of(run).values()) < 10


@pytest.mark.parametrize("noise", ["server", "sum"])
def test_no_change_is_too_long_before_the_noise(noise: str, federate: Federate) -> None:
    """Whether a node counts does not depend on changes without noise: only `privacy.clip-norm` bounds them."""
    run = federate("fedavg", NODES, **noisy(noise, **{"target": "mlp", "max-update-ratio": 1e-6}))
    assert read_failures(run) == []


@pytest.mark.parametrize(
    ("changes", "release"),
    [
        ({"privacy.noise": "local"}, Release(unit="client", mechanism="gaussian", noise_multiplier=Z)),
        (SUM, Release(unit="client", mechanism="discrete-gaussian", noise_multiplier=Z, bounded_by="nodes")),
        ({"privacy.noise": "sum"}, None),  # a malicious server about secure sums
        (
            {"privacy.noise": "server"},
            Release(unit="client", mechanism="gaussian", noise_multiplier=Z, bounded_by="server"),
        ),
        ({"privacy.noise-multiplier": 0.0}, None),
        ({"privacy.unit": "none"}, None),
    ],
)
def test_what_an_upload_releases(
    changes: Settings, release: Release | None, make_settings: Callable[..., Settings]
) -> None:
    """A release names who adds the noise; shares of noise count only in a secure sum."""
    base: Settings = {"privacy.unit": "client", "privacy.clip-norm": C, "privacy.noise-multiplier": Z}
    assert client_release(RunConfig.from_flat(make_settings("fedavg") | base | changes)) == release
