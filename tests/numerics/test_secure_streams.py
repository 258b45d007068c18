"""Streams of masks: ChaCha20 as published, in any vector's size, and the same on every machine."""

import sys

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

from hyperfl_flwr.protocol.secure_sums import streams
from hyperfl_flwr.protocol.secure_sums.streams import add_stream

KEY = bytes(range(32))
RFC_8439_A1 = bytes.fromhex(
    "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
    "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"
    "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
    "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f"
)
"""RFC 8439, appendix A.1, test vectors 1 and 2: the blocks 0 and 1 of the stream of key 0 and nonce 0."""


def keystream(key, size):
    return Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor().update(bytes(size))


@pytest.mark.parametrize("kind", ["<u4", "<u8"])
def test_the_stream_is_chacha20(kind):
    """The first 128 bytes of key 0, read as little-endian integers."""
    vector = np.zeros(128 // np.dtype(kind).itemsize, np.dtype(kind).newbyteorder("="))
    add_stream(vector, bytes(32), 1)
    assert vector.astype(kind).tobytes() == RFC_8439_A1
    add_stream(vector, bytes(32), -1)
    assert not vector.any()


@pytest.mark.parametrize("size", [1, 3, 255, 256, 257, 511, 512, 513, 2000])
def test_chunks_have_no_borders(size, monkeypatch):
    """Vectors around one and two chunks of 1 KB continue one stream, modulo 2^32."""
    monkeypatch.setattr(streams, "CHUNK_BYTES", 1024)
    start = np.random.default_rng(0).integers(0, 2**32, size, dtype=np.uint32)
    vector = start.copy()
    add_stream(vector, KEY, 1)
    expected = (start.astype(np.uint64) + np.frombuffer(keystream(KEY, 4 * size), "<u4")) % 2**32
    assert np.array_equal(vector, expected)
    add_stream(vector, KEY, -1)
    assert np.array_equal(vector, start)


def test_a_vector_of_several_megabytes():
    size = streams.CHUNK_BYTES // 4 * 2 + 77
    vector = np.zeros(size, np.uint32)
    add_stream(vector, KEY, 1)
    assert vector.tobytes() == keystream(KEY, 4 * size)


def test_an_empty_vector_is_no_error():
    add_stream(np.zeros(0, np.uint32), KEY, 1)


def test_numbers_do_not_depend_on_the_machine(monkeypatch):
    """A big-endian machine reads the stream's bytes in its own order, so they are swapped there.

    Here, as if the machine were big-endian, the swap shows: each number is read from its bytes in reverse.
    """
    monkeypatch.setattr(sys, "byteorder", {"little": "big", "big": "little"}[sys.byteorder])
    monkeypatch.setattr(streams, "CHUNK_BYTES", 64)
    vector = np.zeros(20, np.uint32)
    add_stream(vector, KEY, 1)
    assert vector.astype("<u4").tobytes() == np.frombuffer(keystream(KEY, 80), ">u4").astype("<u4").tobytes()


@pytest.mark.parametrize(
    "vector",
    [np.zeros(4, np.int32), np.zeros(4, np.float32), np.zeros((2, 2), np.uint32), np.zeros(8, np.uint64)[::2]],
    ids=["signed", "float", "matrix", "strided"],
)
def test_other_vectors_are_refused(vector):
    with pytest.raises(ValueError, match="contiguous vectors of uint32 or uint64"):
        add_stream(vector, KEY, 1)
    assert not vector.any()


def test_vectors_longer_than_a_stream_are_refused(monkeypatch):
    """A block counter of 32 bits ends after 2^38 bytes; then the stream would begin again."""
    assert streams._LONGEST == 2**32 * 64
    monkeypatch.setattr(streams, "_LONGEST", 40)
    add_stream(np.zeros(10, np.uint32), KEY, 1)
    with pytest.raises(ValueError, match="at most 40 bytes, got 44"):
        add_stream(np.zeros(11, np.uint32), KEY, 1)
