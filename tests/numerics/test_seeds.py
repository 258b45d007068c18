"""Seeds by name: stable on every machine, and different for every purpose."""

import hashlib
import itertools

import numpy as np
import pytest
import torch

from hyperfl_flwr.contract.base import NUM_CLIENTS
from hyperfl_flwr.core import rng
from hyperfl_flwr.core.rng import numpy_generator, seed_for, torch_generator

KNOWN = [
    ((0,), b"(0,)", 5254295370254170289),
    ((0, "batches", 3, 1), b"(0, 'batches', 3, 1)", 4238191821469231598),
    ((12345, "own-embedding", 7), b"(12345, 'own-embedding', 7)", 7383880749584981357),
]
"""Path, the text that is hashed, and the seed: the first 8 bytes of its SHA-256 without the last bit."""

DRAWN = [
    ("fedavg", {"training": (1, 2), "dropout": (1, 2)}),
    ("fedala", {"aggregation": (2,)}),
    ("fedgen", {"fedgen": (2,)}),
    ("it-pfl", {"encoder": (1,)}),
    ("priv-hfl", {"pseudo-data": (1, 2), "pseudo-batches": (1, 2)}),
    ("fedakd", {"held back": ()}),
    ("knn-per", {"held-back": ()}),
]
"""Method, and the purposes for which its clients draw, each with its rounds; none if all rounds draw the same."""


@pytest.mark.parametrize(("path", "text", "number"), KNOWN)
def test_seeds_are_those_of_the_first_release(path, text, number):
    """Seeds equal stored numbers and hashlib on a hand-written text; a change would alter all stored results."""
    assert seed_for(*path) == number == int(hashlib.sha256(text).hexdigest()[:16], 16) // 2


def test_different_paths_have_different_seeds():
    """Every combination of seed, purpose, client and round differs; order, type and depth matter too."""
    paths = list(itertools.product(range(5), ["training", "sampling", "embedding"], range(30), range(30)))
    paths += [(0,), (0, 1), (0, 1, 0), (0, "1"), (0, "training"), (0, "training", 1), (0, 1, "training"), (0, "")]
    paths += [(0, "a", "b"), (0, "ab"), (0, "a,b"), (0, "a', 'b")]
    seeds = [seed_for(*path) for path in paths]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_generators_are_seeded_by_the_path():
    """They equal numpy's default_rng and torch's Generator with the path's seed, whatever was drawn elsewhere."""
    path = (3, "training", 2, 9)
    expected = np.random.default_rng(seed_for(*path)).random(5)
    np.testing.assert_array_equal(numpy_generator(*path).random(5), expected)
    torch.rand(3, generator=torch_generator(*path))
    drawn = torch.rand(5, generator=torch_generator(*path))
    assert torch.equal(drawn, torch.rand(5, generator=torch.Generator().manual_seed(seed_for(*path))))


def test_numpy_integers_are_integers():
    """A numpy integer gives the same seed as a Python integer."""
    assert seed_for(np.int64(3), "training") == seed_for(3, "training")


def test_no_global_generator_is_touched():
    """The states of numpy's and torch's global generators do not change."""
    numpy_state, torch_state = np.random.get_state()[1].copy(), torch.get_rng_state()  # noqa: NPY002
    numpy_generator(0, "training").random(10)
    torch.rand(10, generator=torch_generator(0, "training"))
    np.testing.assert_array_equal(np.random.get_state()[1], numpy_state)  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), torch_state)


@pytest.mark.parametrize(("method", "purposes"), DRAWN)
def test_no_two_clients_and_rounds_draw_the_same(method, purposes, federate, monkeypatch):
    """The paths of a client's generators have its number, and the round; the server's have the purpose alone."""
    paths = set()
    monkeypatch.setattr(rng, "seed_for", lambda seed, *path: paths.add(path) or seed_for(seed, *path))
    federate(method, target="mlp")
    for purpose, rounds in purposes.items():
        found = {path[1:] for path in paths if path[0] == purpose} - {()}
        expected = itertools.product(range(NUM_CLIENTS), rounds) if rounds else ((c,) for c in range(NUM_CLIENTS))
        assert found == set(expected), purpose
