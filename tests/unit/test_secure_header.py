"""The header of a secure step: one encoding of each header, and nothing in it that nodes could read differently."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from masked_steps import header_of, private_key

from hyperfl_flwr.protocol.secure_sums import header as headers
from hyperfl_flwr.protocol.secure_sums.header import Header, arrays_digest, settings_digest, transcript_of
from hyperfl_flwr.protocol.secure_sums.keys import public_of

HEADER = header_of([0, 2, 5], 3, number=7)
DATA = HEADER.to_bytes()


def changed(**fields):
    """Return the canonical JSON of the header with other values of some fields."""
    return canonical(json.loads(DATA) | fields)


def changed_row(**fields):
    document = json.loads(DATA)
    document["nodes"][1] |= fields
    return canonical(document)


def canonical(document):
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def test_a_header_survives_its_encoding():
    assert Header.from_bytes(DATA) == HEADER
    assert Header.from_bytes(DATA).to_bytes() == DATA
    assert (HEADER.num_clients, HEADER.row(2), HEADER.row(1)) == (6, HEADER.nodes[1], None)


def test_the_bytes_do_not_change_between_versions_of_the_project():
    """Nodes and server may run different versions; a change of these bytes needs another `VERSION`."""
    header = header_of([0, 3], 2)
    keys = (public_of(private_key(0)), public_of(private_key(3)))
    assert header.to_bytes().decode() == (
        '{"arrays":"' + "a5" * 32 + '","experiment":"fedcba9876543210","max_examples":1000,'
        '"metrics":["train-loss","personalized-accuracy"],"nodes":['
        '{"clients":[0,1],"key":"' + keys[0] + '","partition":0,"signature":"","versions":[0,0]},'
        '{"clients":[6,7],"key":"' + keys[1] + '","partition":3,"signature":"","versions":[0,0]}],'
        '"phase":"train","round":1,"session":"0123456789abcdef0123456789abcdef",'
        '"settings":"' + "5e" * 32 + '","squares":false,"threshold":2,"version":2}'
    )
    expected = "7299205849768d81b140cd5d8aa7c8e582e4be3643577fd07caa84aca841f42f"
    assert transcript_of(header.to_bytes()).hex() == expected


def test_steps_ascend():
    """Training comes before the evaluation of the same round, and that before the next training."""
    steps = [header_of([0], 1, number, phase).step for number in (1, 2, 9) for phase in ("train", "evaluate")]
    assert steps == sorted(set(steps))


OTHERS = {
    "session": "f" * 32,
    "experiment": "f" * 16,
    "round": 8,
    "phase": "evaluate",
    "threshold": 2,
    "max_examples": 999,
    "metrics": ["personalized-accuracy", "train-loss"],
    "squares": True,
    "settings": "f" * 64,
    "arrays": "f" * 64,
}
OTHERS_OF_A_ROW = {
    "partition": 3,
    "key": "f" * 64,
    "signature": "ff",
    "clients": [4, 7],
    "versions": [6, 1],
}


def test_every_field_is_part_of_the_transcript():
    """Any field changed alone gives another T, so that masks of nodes with different headers do not cancel."""
    found = [DATA, *(changed(**{name: value}) for name, value in OTHERS.items())]
    found += [changed_row(**{name: value}) for name, value in OTHERS_OF_A_ROW.items()]
    found.append(replace(HEADER, nodes=HEADER.nodes[:2]).to_bytes())
    assert {"version", "nodes", *OTHERS} == set(json.loads(DATA))
    assert set(OTHERS_OF_A_ROW) == set(json.loads(DATA)["nodes"][1])
    for data in found:
        assert Header.from_bytes(data).to_bytes() == data
    assert len({transcript_of(data) for data in found}) == len(found) == 17


WRONG = {
    "session": ["", "0" * 31, "0" * 33, "F" * 32, "0" * 31 + "\n", 5, None, ["0" * 32]],
    "experiment": ["", "0" * 32, "../0123456789abcd", 5, None],
    "round": [0, -1, True, 1.0, "1", None, 2**40 + 1, 10**30],
    "phase": ["", "TRAIN", "query", 0, None, []],
    "threshold": [0, -1, True, 2.0, "2", None],
    "max_examples": [0, -1, True, 1000.0, "auto", None, 2**41],
    "metrics": ["abc", "", {}, {"loss": 1}, 5, None, ["A"], [""], [1], [None], ["a", "a"], [["a"]], ["a b"],
                ["a" * 101], [f"m{number}" for number in range(101)]],
    "squares": [0, 1, "true", None, []],
    "settings": ["", "0" * 63, "G" * 64, 5, None],
    "arrays": ["", "0" * 65, "0" * 63 + "A", 5, None],
    "nodes": [5, None, "", {}, [5], [None], [[]], [{}], ["abc"]],
    "version": [0, 1, 3, "2", None, []],
}  # fmt: skip
WRONG_IN_A_ROW = {
    "partition": [-1, 0, 5, 6, True, 2.0, "2", None, [2]],
    "key": ["", "0" * 63, "F" * 64, 5, None, public_of(private_key(0))],
    "signature": ["0", "AB", "00" * 129, 5, None],
    "clients": [[], [5, 4], [4, 4], [4, 0], [0, 4], [4.0, 5], [True, 5], ["4", "5"], [-1, 5], "45", {"4": 1, "5": 1}, 4,
                None, [4], [4, 5, 6], [[4], [5]]],
    "versions": [[], [0], [0, 0, 0], [0, -1], [0, True], [0, 0.0], ["0", "0"], "00", {"0": 0, "1": 0}, 0, None],
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_wrong_values_are_refused(name, value):
    with pytest.raises(ValueError):
        Header.from_bytes(changed(**{name: value}))


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in WRONG_IN_A_ROW.items() for value in values]
)
def test_wrong_values_in_a_row_are_refused(name, value):
    with pytest.raises(ValueError):
        Header.from_bytes(changed_row(**{name: value}))


@pytest.mark.parametrize("name", [*OTHERS, "version", "nodes"])
def test_fields_are_neither_missing_nor_unknown(name):
    document = json.loads(DATA)
    del document[name]
    with pytest.raises(ValueError):
        Header.from_bytes(canonical(document))
    with pytest.raises(ValueError):
        Header.from_bytes(canonical(json.loads(DATA) | {f"{name}2": document.get("round")}))


@pytest.mark.parametrize("name", OTHERS_OF_A_ROW)
def test_fields_of_a_row_are_neither_missing_nor_unknown(name):
    document = json.loads(DATA)
    del document["nodes"][1][name]
    with pytest.raises(ValueError):
        Header.from_bytes(canonical(document))
    with pytest.raises(ValueError):
        Header.from_bytes(changed_row(**{f"{name}2": 1}))


@pytest.mark.parametrize(
    "data",
    [
        DATA.replace(b'"round":7', b'"round":6,"round":7'),
        DATA.replace(b'"round":7', b'"round": 7'),
        DATA + b"\n",
        DATA.replace(b'"round":7', b'"round":7.0'),
        DATA.replace(b'"round":7', b'"round":7e0'),
        DATA.replace(b'"version":2', b'"version":2.0'),
        DATA.replace(b'"squares":false', b'"squares":0'),
        DATA.replace(b'"train"', b'"\\u0074rain"'),
        DATA.replace(b"{", b'{"version":2,', 1).replace(b',"version":2}', b"}"),
        b"\xef\xbb\xbf" + DATA,
        DATA.decode().encode("utf-16"),
        DATA.decode().encode("utf-32"),
    ],
    ids=["duplicate", "space", "newline", "float", "exponent", "float-version", "number-squares", "escape", "order",
         "byte-order-mark", "utf-16", "utf-32"],
)  # fmt: skip
def test_other_encodings_of_the_same_header_are_refused(data):
    """JSON itself allows each of them, and without this check the same header would have many transcripts."""
    assert data != DATA
    with pytest.raises(ValueError):
        Header.from_bytes(data)


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{", b"[]", b"5", b"null", b'"text"', b"\xff\xfe", b"{}", b'{"version":2}', b"NaN",
        b"[" * 100_000, b'{"version":' * 100_000, b'{"version":' + b"9" * 10_000 + b"}",
        DATA.replace(b'"round":7', b'"round":NaN'), DATA.replace(b'"round":7', b'"round":' + b"[" * 5000 + b"]" * 5000),
        DATA.replace(b'"train-loss"', b"[" * 500 + b"]" * 500),
    ],
    ids=range(16),
)  # fmt: skip
def test_other_documents_are_refused(data):
    """Deep nesting and long numbers end in `ValueError`, too."""
    with pytest.raises(ValueError):
        Header.from_bytes(data)


def test_long_headers_are_not_parsed(monkeypatch):
    assert headers.MOST_BYTES == 16 * 2**20
    monkeypatch.setattr(headers, "MOST_BYTES", len(DATA))
    Header.from_bytes(DATA)
    monkeypatch.setattr(headers, "MOST_BYTES", len(DATA) - 1)
    with pytest.raises(ValueError, match="at most"):
        Header.from_bytes(DATA)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([*OTHERS, "version", "nodes", *OTHERS_OF_A_ROW]), JSON)
def test_a_header_is_refused_or_read_as_it_is(name, value):
    """Any JSON value in any field: `ValueError`, or a header with the same bytes."""
    data = (changed_row if name in OTHERS_OF_A_ROW else changed)(**{name: value})
    try:
        header = Header.from_bytes(data)
    except ValueError:
        return
    assert header.to_bytes() == data


@settings(max_examples=300, deadline=None)
@given(st.integers(0, len(DATA) - 1), st.binary(max_size=3), st.integers(0, 3))
def test_damaged_bytes_are_refused_or_read_as_they_are(place, inserted, removed):
    data = DATA[:place] + inserted + DATA[place + removed :]
    try:
        header = Header.from_bytes(data)
    except ValueError:
        return
    assert header.to_bytes() == data


def test_the_digest_of_settings_depends_on_all_but_their_order():
    """It depends on every key and value and their types, not on the order; floats are exact."""
    settings = {"learning-rate": 0.1, "rounds": 3, "method": "fedavg", "ledger": False}
    found = settings_digest(settings)
    assert found == settings_digest(dict(reversed(settings.items())))
    assert len(found) == 64
    changes = [
        {"learning-rate": float(np.nextafter(0.1, 1))}, {"rounds": 3.0}, {"rounds": True}, {"rounds": "3"},
        {"learning-rate": (0.1).hex()}, {"method": "fedrep"}, {"ledger": 0}, {"ledger": "false"}, {"seed": 0},
    ]  # fmt: skip
    digests = {settings_digest(settings | change) for change in changes}
    digests.add(settings_digest({key: value for key, value in settings.items() if key != "rounds"}))
    assert len(digests | {found}) == len(changes) + 2


def test_the_digest_of_arrays_depends_on_all_but_their_order():
    """It depends on names, types, shapes and every element, not on the order or the layout in memory."""
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    arrays = {"net/a": array, "net/b": np.zeros((), np.float64), "net/c": np.zeros((0, 2), np.float32)}
    found = arrays_digest(arrays)
    assert found == arrays_digest(dict(reversed(arrays.items())))
    assert found == arrays_digest(arrays | {"net/a": np.asfortranarray(array)})
    last = array.copy()
    last[-1, -1] = np.nextafter(np.float32(5), np.float32(6))
    changes = [
        {"net/a": last}, {"net/a": array.T.copy()}, {"net/a": array.reshape(3, 2)}, {"net/a": array.reshape(-1)},
        {"net/a": array.view(np.int32)}, {"net/a": array.astype(">f4")}, {"net/a": array.astype(np.float64)},
        {"net/b": np.zeros(1)}, {"net/b": np.float64(-0.0)}, {"net/c": np.zeros((0, 3), np.float32)}, {"net/d": array},
    ]  # fmt: skip
    digests = {arrays_digest(arrays | {key: np.asarray(value) for key, value in one.items()}) for one in changes}
    digests.add(arrays_digest({"net/a": array}))
    assert len(digests | {found}) == len(changes) + 2
