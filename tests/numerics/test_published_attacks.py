"""The attacks of other papers and the one with a learned prior: their mathematics, and controls that must fail."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from attacked import MEAN, STD, Attacked, Samples, digits, fedavg, fedrep, hyperfl, relative_error, samples
from torch.func import functional_call
from torch.nn import functional

from hyperfl_flwr.attacks import head_gradient
from hyperfl_flwr.attacks.base import AttackSettings, Reconstruction
from hyperfl_flwr.attacks.image_space import low_resolution
from hyperfl_flwr.attacks.last_layer import last_layer_of
from hyperfl_flwr.attacks.learned_prior import PriorTraining, learned_space, train_decoder
from hyperfl_flwr.attacks.objectives import cosine_distance
from hyperfl_flwr.attacks.optimisation import Optimisation
from hyperfl_flwr.attacks.optimiser_loop import Problems, solve
from hyperfl_flwr.attacks.readout import mean_gradients, read_out
from hyperfl_flwr.attacks.registry import ATTACKS
from hyperfl_flwr.attacks.scoring import match
from hyperfl_flwr.audit.prior import check_prior, public_images, trained_prior
from hyperfl_flwr.core.errors import ConfigError, DataError
from hyperfl_flwr.data.registry import load_dataset
from hyperfl_flwr.models.hypernetwork import Hypernetwork
from hyperfl_flwr.models.targets import build_target
from hyperfl_flwr.training.local_sgd import Epochs

STEP = Epochs(epochs=1, batch_size=8, momentum=0.5, weight_decay=5e-4)
QUICK = Optimisation(iterations=200, learning_rate=1.0, signed=True, total_variation=3e-3)
DLG = Optimisation(iterations=40, learning_rate=1.0, optimiser="l-bfgs", objective="squared", total_variation=0.0)
TINY = PriorTraining(steps=150, batch_size=32, width=16)


def attack(name: str, clients: list[Attacked], **settings: object) -> list[Reconstruction]:
    """Return the results of an attack on clients of one method."""
    return ATTACKS[name].run(
        [client.observation for client in clients], clients[0].knowledge, AttackSettings(**settings)
    )


def psnr(results: list[Reconstruction], private: list[torch.Tensor]) -> list[float]:
    """Return the mean PSNR of each client's images, in dB."""
    return [float(match(result.images, own.numpy()).psnr.mean()) for result, own in zip(results, private, strict=True)]


def private_digits(num_clients: int, num_images: int = 1, side: int = 8) -> tuple[list[Samples], list[torch.Tensor]]:
    parts = [digits(num_images, side=side, first=num_images * client) for client in range(num_clients)]
    return [samples(*part) for part in parts], [images for images, _ in parts]


def test_enlarging_is_torchs_bicubic_interpolation_and_linear() -> None:
    """The pixels are those of `interpolate`; the gradient is the adjoint R^T y S; equal latents give an equal image."""
    space = low_resolution((3, 11, 8), 4)
    latents = space.draw(2, torch.Generator().manual_seed(0)).requires_grad_()
    assert latents.shape == (2, 3, 3, 2)
    pixels = space.pixels(latents, space.constants)
    expected = functional.interpolate(latents, (11, 8), mode="bicubic")
    torch.testing.assert_close(pixels, expected)
    other = torch.randn(pixels.shape, generator=torch.Generator().manual_seed(1))
    (adjoint,) = torch.autograd.grad((pixels * other).sum(), latents)
    torch.testing.assert_close(adjoint, space.constants["rows"].T @ other @ space.constants["columns"])
    torch.testing.assert_close(space.pixels(torch.ones(1, 3, 3, 2), space.constants), torch.ones(1, 3, 11, 8))


@pytest.mark.parametrize(("name", "make"), [("rog", fedavg), ("rog", hyperfl), ("rog", fedrep), ("rog-paper", hyperfl)])
def test_images_of_low_resolution_are_recovered_from_any_upload(name: str, make: object) -> None:
    """Images that lie in the searched space are found; those of the other client are not."""
    space = low_resolution((1, 12, 12), 4)
    drawn = [space.draw(1, torch.Generator().manual_seed(seed)) for seed in (3, 4)]
    private = [space.pixels(latents, space.constants).clamp(0, 1) for latents in drawn]
    width = {"hidden_width": 16} if make is hyperfl else {}
    clients = [make(samples(images, torch.tensor([label])), STEP, **width) for label, images in enumerate(private)]
    results = attack(name, clients)
    assert results[0].iterations == 100
    assert min(psnr(results, private)) > 17
    assert max(psnr(results, private[::-1])) < 13


def test_l_bfgs_solves_each_problem_by_itself() -> None:
    """Of three quadratic problems with the condition 1e4, each ends at its solution, alone or together with others."""
    scale = torch.logspace(0, -2, 4).reshape(1, 1, 2, 2)
    targets = torch.stack([torch.full((1, 1, 2, 2), value) for value in (0.3, -0.7, 0.9)])
    problems = Problems(
        simulate=lambda unknowns, constants: {"all": scale * unknowns["images"] + constants["offset"]},
        observed={"all": scale * targets},
        constants={"offset": torch.zeros(3)},
        low=-torch.ones(1, 1, 1),
        high=torch.ones(1, 1, 1),
    )
    settings = replace(DLG, iterations=20)
    seen = []
    together = solve(problems, lambda _: {"images": torch.zeros_like(targets)}, settings, lambda *at: seen.append(at))
    alone = solve(problems.row(2), lambda _: {"images": torch.zeros_like(targets[:1])}, settings)
    torch.testing.assert_close(together.unknowns["images"], targets, rtol=0, atol=0.05)
    assert together.objective.max() < 1e-4
    torch.testing.assert_close(alone.unknowns["images"], together.unknowns["images"][2:], rtol=0, atol=0)
    assert seen == [(20, 20)]
    assert alone.iterations[0] == together.iterations[2]


def test_steps_that_l_bfgs_does_not_take_are_not_counted() -> None:
    """A problem that starts at its solution takes none, the other one some, of 30 in each of two starts."""
    targets = torch.stack([torch.zeros(1, 1, 2, 2), torch.full((1, 1, 2, 2), 0.5)])
    problems = Problems(
        simulate=lambda unknowns, constants: {"all": unknowns["images"] + constants["offset"]},
        observed={"all": targets},
        constants={"offset": torch.zeros(2)},
        low=-torch.ones(1, 1, 1),
        high=torch.ones(1, 1, 1),
    )
    settings = replace(DLG, iterations=30, restarts=2)
    taken = solve(problems, lambda _: {"images": torch.zeros_like(targets)}, settings).iterations
    assert taken[0] == 0
    assert 0 < taken[1] < 60


def test_deep_leakage_is_exact_with_sigmoids_and_stops_at_rectifiers() -> None:
    """Without labels, digits are found nearly exactly; with LeakyReLU and pooling, one is not, after as many steps."""
    data, private = private_digits(2)
    smooth = attack("dlg", [fedavg(each, STEP, target="own_networks:smooth") for each in data], optimisation=DLG)
    assert min(psnr(smooth, private)) > 30
    assert max(psnr(smooth, private[::-1])) < 15
    (stopped,) = attack("dlg", [fedavg(data[0], STEP)], optimisation=DLG)
    assert stopped.objective > 1e-2
    assert stopped.iterations < DLG.iterations


def test_equation_ten_vanishes_at_the_readout() -> None:
    """With theta = h(v) - g as the label and the squared error, the hypernetwork's gradient is the client's."""
    (data,), _ = private_digits(1)
    client = hyperfl(data, STEP)
    reading = read_out(client.observation, client.knowledge)
    network = Hypernetwork(build_target("cnn", (1, 8, 8), 10).extractor, hidden_width=128)
    sent = {k.removeprefix("hypernetwork/"): torch.from_numpy(v) for k, v in client.observation.received.items()}
    network.load_state_dict(sent, assign=True)
    gradient = torch.cat([part.flatten() for part in reading.gradient.values()])
    output = network(reading.embedding)
    loss = (output - (output - gradient).detach()).square().sum() / 2
    found = torch.autograd.grad(loss, list(network.parameters()))
    observed = mean_gradients(client.observation, client.knowledge)
    for (name, _), value in zip(network.named_parameters(), found, strict=True):
        assert relative_error(value, observed[f"hypernetwork/{name}"]) < 1e-2, name
    wrong = torch.autograd.grad(network(1.1 * reading.embedding).square().sum() / 2, network.hidden.weight)[0]
    assert relative_error(wrong, observed["hypernetwork/hidden.weight"]) > 0.1


def test_the_tailored_attack_compares_features() -> None:
    """For one image the objective at a candidate is 1 - cos([u, 1], [u(x), 1]); convolutions do not count."""
    (data,), _ = private_digits(1)
    client = hyperfl(data, STEP)
    reading = read_out(client.observation, client.knowledge)
    candidate = torch.rand(1, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    below = last_layer_of(build_target("cnn", (1, 8, 8), 10).extractor).below
    values = {name.removeprefix("extractor."): value for name, value in reading.parameters.items()}
    weights = {name: values[name] for name, _ in below.named_parameters()}
    inputs = [functional_call(below, weights, (x,)) for x in (data.train_images, (candidate - MEAN) / STD)]
    extended = [functional.pad(u, (0, 1), value=1.0) for u in inputs]
    first = Optimisation(iterations=1, learning_rate=1e-9, total_variation=0.0)
    (result,) = attack("tailored", [client], optimisation=first, start=[candidate.numpy()])
    expected = cosine_distance({"u": extended[1]}, {"u": extended[0]})
    assert result.objective == pytest.approx(float(expected), rel=1e-3)
    (whole,) = attack("head-gradient", [client], optimisation=first, start=[candidate.numpy()])
    assert whole.objective != pytest.approx(result.objective, rel=1e-2)


def test_the_tailored_attack_recovers_single_images() -> None:
    data, private = private_digits(3, side=12)
    results = attack("tailored", [hyperfl(each, STEP) for each in data], optimisation=replace(QUICK, iterations=120))
    assert np.median(psnr(results, private)) > 20
    assert max(psnr(results, private[1:] + private[:1])) < 15
    assert ATTACKS["tailored"].defaults is head_gradient.DEFAULTS


def test_a_prior_is_trained_alike_each_time_and_kept_by_content(tmp_path: Path) -> None:
    """The parameters are equal bit by bit, also after a damaged file; other settings and images have other files."""
    quick = replace(TINY, steps=3)
    first = trained_prior("digits", (1, 8, 8), training=quick, base=tmp_path)
    (path,) = (tmp_path / "priors").iterdir()
    kept = path.stat().st_mtime_ns
    again = trained_prior("digits", (1, 8, 8), training=quick, base=tmp_path)
    assert path.stat().st_mtime_ns == kept
    path.write_bytes(path.read_bytes()[:100])
    anew = trained_prior("digits", (1, 8, 8), training=quick, base=tmp_path)
    for name, value in first.constants.items():
        assert torch.equal(value, again.constants[name])
        assert torch.equal(value, anew.constants[name])
    trained_prior("digits", (1, 8, 8), training=replace(quick, seed=1), base=tmp_path)
    coloured = trained_prior("digits", (3, 9, 10), training=quick, base=tmp_path)
    assert len(list((tmp_path / "priors").iterdir())) == 3
    codes = coloured.draw(2, torch.Generator().manual_seed(0))
    assert codes.shape == (2, 12, 3, 3)
    assert coloured.pixels(codes, coloured.constants).shape == (2, 3, 9, 10)


def test_public_images_get_the_shape_of_the_attacked_ones() -> None:
    images = public_images("digits", (3, 12, 12))
    assert images.shape[1:] == (3, 12, 12)
    assert images.shape[0] > 1000
    np.testing.assert_array_equal(images[:, 0], images[:, 2])
    assert 0 <= images.min() < images.max() <= 1


def test_inversion_with_a_learned_prior_finds_what_noise_hides() -> None:
    """Noisy uploads about images that the decoder can draw: `ig` finds less of them, and both nothing of others."""
    public = digits(1000, side=12, first=700)[0]
    space = learned_space((1, 12, 12), train_decoder(public, TINY), TINY.width)
    drawn = [space.pixels(space.draw(1, torch.Generator().manual_seed(n)), space.constants) for n in range(3)]
    private = [images.detach() for images in drawn]
    clients = [noisy(fedavg(samples(images, torch.tensor([n])), STEP), n) for n, images in enumerate(private)]
    settings = replace(QUICK, iterations=150, polish=20)
    plain = psnr(attack("ig", clients, optimisation=settings), private)
    seen = []
    results = attack(
        "ig-prior", clients, optimisation=replace(settings, learning_rate=0.2), space=space,
        progress=lambda done, total: seen.append(done / total),
    )  # fmt: skip
    found = psnr(results, private)
    assert np.median(found) > np.median(plain) + 2
    assert np.median(psnr(results, private[1:] + private[:1])) < np.median(found) - 6
    assert results[0].iterations == 170
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
    with pytest.raises(ValueError, match="got none"):
        attack("ig-prior", clients)


def noisy(client: Attacked, seed: int) -> Attacked:
    """Return the client with Gaussian noise of 0.01 of the norm of its update in each entry."""
    rng, sent, reply = np.random.default_rng(seed), client.observation.received, client.observation.reply
    norm = np.sqrt(sum(np.square(reply[key] - sent[key], dtype=np.float64).sum() for key in sent))
    noise = {key: np.float32(0.01 * norm) * rng.standard_normal(v.shape, dtype=np.float32) for key, v in sent.items()}
    reply = {key: value + noise[key] for key, value in reply.items()}
    return replace(client, observation=replace(client.observation, reply=reply))


def test_a_prior_needs_images(tmp_path: Path) -> None:
    vectors = np.random.default_rng(0).random((20, 5), dtype=np.float32)
    np.savez(tmp_path / "v.npz", features=vectors, labels=np.arange(20) % 2)
    with pytest.raises(ConfigError, match="must be learned from images"):
        public_images(f"npz:{tmp_path / 'v.npz'}", (1, 8, 8))


def test_a_prior_must_not_hold_private_images(tmp_path: Path) -> None:
    """Equal images are found under another name, and related data sets by their names; others are allowed."""
    rng = np.random.default_rng(0)
    images, others = rng.integers(0, 256, (2, 20, 1, 8, 8), dtype=np.uint8)
    paths = {name: tmp_path / f"{name}.npz" for name in ("same", "other")}
    for path, kept in zip(paths.values(), (images, others), strict=True):
        np.savez(path, images=kept, labels=np.arange(20) % 2)
    private = images[[3, 5]].astype(np.float32) / np.float32(255)
    trained = load_dataset(f"npz:{paths['same']}").train
    held = trained.scaled(np.arange(2))
    with pytest.raises(ConfigError, match=r"2 of the 2 private images of digits are in npz:.*name another --prior"):
        check_prior(f"npz:{paths['same']}", "digits", held)
    check_prior(f"npz:{paths['other']}", "digits", private)
    check_prior(f"npz:{paths['same']}", "digits", np.zeros((2, 3, 8, 8), dtype=np.float32))
    with pytest.raises(DataError, match="the prior cannot be learned from 'nowhere'"):
        check_prior("nowhere", "digits", private)
    with pytest.raises(ConfigError, match="mnist and emnist share images"):
        check_prior("mnist", "emnist", private)
