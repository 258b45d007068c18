"""What the generator's gradient reveals to a server, from the messages of real federations."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hyperfl_flwr.attacks.base import AttackSettings, build_structure, to_pixels
from hyperfl_flwr.attacks.dual_difference import _halves, _read_halves
from hyperfl_flwr.attacks.generator_dlg import noise_space
from hyperfl_flwr.attacks.generator_labels import label_shares, private_counts
from hyperfl_flwr.attacks.ig import _simulation
from hyperfl_flwr.attacks.optimisation import Optimisation
from hyperfl_flwr.attacks.registry import ATTACKS
from hyperfl_flwr.attacks.scoring import match
from hyperfl_flwr.audit.audit import audit, images_of
from hyperfl_flwr.audit.history import ObservationHistory
from hyperfl_flwr.audit.options import Options
from hyperfl_flwr.audit.record_round import AttackedRound, recorded_round
from hyperfl_flwr.audit.report import measure
from hyperfl_flwr.audit.sentences import sentence
from hyperfl_flwr.contract.base import Federate
from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.models.generator import Generator
from hyperfl_flwr.training.distillation import PseudoData, label_probabilities

FEW = Optimisation(iterations=1)
WATCHED: dict[str, Any] = {"audit.clients": "all", "audit.rounds": "all", "num_nodes": 1}


class Draws:
    """Record the pseudo-data and noise that clients draw, in order, without changing them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.noise: list[torch.Tensor] = []
        self.pseudo: list[PseudoData] = []
        forward, draw = Generator.forward, PseudoData.draw.__func__  # type: ignore[attr-defined]

        def making(generator: Generator, noise: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            self.noise.append(noise.clone())
            return forward(generator, noise, labels)

        def drawing(cls: type[PseudoData], *args: Any, **words: Any) -> PseudoData:
            with monkeypatch.context() as patch:
                patch.setattr(Generator, "forward", making)
                self.pseudo.append(draw(cls, *args, **words))
            return self.pseudo[-1]

        monkeypatch.setattr(PseudoData, "draw", classmethod(drawing))


def run_and_watch(federate: Federate, **changes: Any) -> tuple[Path, AttackedRound, ObservationHistory]:
    run = federate("priv-hfl", **WATCHED | changes)
    target, observed = recorded_round(run, {})
    return run, target, ObservationHistory(observed.paths, run)


def test_columns_are_zero_for_absent_labels_and_rows_span_the_noise(
    federate: Federate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Label columns are exactly zero for absent labels, and each z is the offset plus a combination of directions."""
    draws = Draws(monkeypatch)
    _, target, observed = run_and_watch(federate, **{"num_rounds": 1, "priv-hfl.generator-width": 8})
    for observation, pseudo, noise in zip(observed, draws.pseudo, draws.noise, strict=True):
        drawn = torch.bincount(pseudo.labels, minlength=10).numpy()
        gradient = observation.reply["generator/label.weight"]
        np.testing.assert_array_equal((gradient != 0).any(axis=0), drawn > 0)
        assert 0 < (drawn > 0).sum() < 10
        shares = label_shares(observation, target.knowledge())
        assert (shares[drawn == 0] == 0).all()
        directions, offset = noise_space(observation, 8)
        rest = noise - offset
        inside = rest @ torch.linalg.pinv(directions) @ directions
        torch.testing.assert_close(inside, rest, atol=2e-3, rtol=0)
        torch.testing.assert_close(rest @ offset, torch.zeros(8), atol=2e-2, rtol=0)
        assert float(offset.norm()) > 1


@pytest.mark.parametrize("counts", [[30, 20, 5, 0, 0, 1, 2, 0, 10, 3], [40, 0, 0, 0], [5, 5, 5]])
@pytest.mark.parametrize("balance", [1.1, 2.0, 10.0])
def test_private_counts_follow_from_the_labels_probabilities(counts: list[int], balance: float) -> None:
    probabilities = label_probabilities(torch.tensor(counts), balance).numpy()
    np.testing.assert_allclose(private_counts(probabilities, sum(counts), balance), counts, atol=1e-9)


def test_impossible_shares_give_possible_counts() -> None:
    got = private_counts(np.array([0.9, 0.1, 0.0]), 12, 2.0)
    assert (got >= 0).all()
    assert got.sum() == pytest.approx(12)
    assert got.argmax() == 2


def test_the_private_histogram_leaks(federate: Federate) -> None:
    """Four rounds of 100 pseudo-samples reveal the label histogram, which the paper says cannot be inferred.

    Correlation with the true counts is above 0.4; no images are reconstructed.
    """
    _, target, observed = run_and_watch(
        federate,
        **{"num_rounds": 4, "data.partition": "dirichlet", "data.dirichlet-alpha": 0.3},
        **{"priv-hfl.pseudo-samples": 100, "priv-hfl.generator-width": 16},
    )
    found = audit(target, Options(attacks=["generator-dlg"]), observed)["generator-dlg"]
    assert not found.comparisons
    assert [result.findings["rounds-read"] for result in found.results] == [4] * 5
    assert np.mean(found.label_correlation) > 0.4
    truth = [np.bincount(images_of(target, each.client)[1], minlength=10) for each in observed]
    for result, own in zip(found.results, truth, strict=True):
        assert result.label_counts is not None
        assert result.label_counts.sum() == pytest.approx(own.sum())
    document: Mapping[str, Any] = measure(target, {"generator-dlg": found})
    assert document["attacks"]["generator-dlg"]["label_counts"]["correlation"]["mean"] > 0.4
    assert "looked for no images. Its estimate" in sentence(document, "generator-dlg")


def test_pseudo_data_are_rebuilt_and_private_images_are_not(
    federate: Federate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the messages alone, the two pseudo-samples are rebuilt and the client's private image is not.

    Each client has one image and takes one step.
    """
    draws = Draws(monkeypatch)
    _, target, observed = run_and_watch(
        federate,
        **{"num_rounds": 1, "num-clients": 2, "data.train-samples": 1, "batch-size": 1, "priv-hfl.local-steps": 1},
        **{"priv-hfl.pseudo-samples": 2, "priv-hfl.generator-width": 16, "data.partition": "iid"},
    )
    options = Options(attacks=["generator-dlg"], iterations=120, restarts=2)
    found = audit(target, options, observed)["generator-dlg"]
    quality = []
    for result, pseudo in zip(found.results, draws.pseudo, strict=True):
        truth = to_pixels(pseudo.images.detach(), target.knowledge())
        quality.append(float(match(result.images, truth).psnr.min()))
    assert max(quality) > 25
    assert min(quality) > 12
    assert max(float(each.advantage.max()) for each in found.comparisons) < 6
    document = measure(target, {"generator-dlg": found})
    assert document["attacks"]["generator-dlg"]["verdict"] == "recovered nothing"


def test_it_needs_distillation(federate: Federate) -> None:
    _, target, observed = run_and_watch(federate, **{"num_rounds": 1, "priv-hfl.distill": False})
    with pytest.raises(
        ConfigError, match="generator-dlg does not apply to priv-hfl, which sends no generator in round 1"
    ):
        audit(target, Options(attacks=["generator-dlg"]), observed)
    with pytest.raises(ValueError, match="the clients do not distil"):
        label_shares(observed[0], target.knowledge())


def test_one_step_on_images_and_pseudo_data_is_one_on_all_of_them(
    federate: Federate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The four true images and four pseudo-images together cause the gradient that dual-difference matches."""
    draws = Draws(monkeypatch)
    _, target, observed = run_and_watch(
        federate,
        **{"num_rounds": 1, "num-clients": 2, "data.train-samples": 4, "batch-size": 4, "priv-hfl.local-steps": 1},
        **{"priv-hfl.pseudo-samples": 4},
    )
    knowledge = target.knowledge()
    assert all(_halves(observation, knowledge) for observation in observed)
    for client, pseudo in enumerate(draws.pseudo):
        reading, data = _read_halves(observed[client], knowledge), target.data().client(client)
        images = torch.cat([data.train_images, pseudo.images.detach()])
        constants = {**reading.parameters, "labels": torch.cat([data.train_labels, pseudo.labels])}
        simulate = _simulation(
            build_structure(knowledge), knowledge.with_steps(replace(knowledge.steps, batch_size=8, clip_norm=0.0)), 1
        )
        for name, value in simulate({"images": images}, constants).items():
            torch.testing.assert_close(reading.gradient[name], value, atol=1e-5, rtol=1e-3)
    (found, _) = ATTACKS["dual-difference"].run(observed, knowledge, AttackSettings(optimisation=FEW))
    assert (len(found.images), found.findings["mixture"]) == (8, 0.0)
    known = [data.train_labels.numpy()] * 2
    (found, _) = ATTACKS["dual-difference"].run(observed, knowledge, AttackSettings(optimisation=FEW, labels=known))
    assert (len(found.images), found.findings["mixture"]) == (4, 1.0)
