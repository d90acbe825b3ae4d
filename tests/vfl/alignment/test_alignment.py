"""Private alignment: the group, the protocol without sockets, and what each client sees."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from hypothesis import given, settings
from hypothesis import strategies as st
from nacl.bindings import crypto_core_ed25519_from_uniform

from tests.vfl.alignment.exchange import Exchange, silent
from vfl.alignment import MATCHINGS, AlignmentError, AlignmentRefused, base_ot, encode_ids, group, okvs, ot
from vfl.alignment.ecdh import LIST, leader, member, positions_in_all
from vfl.alignment.group import ELEMENT, FIELD, blind, hash_and_blind, hash_to_curve, montgomery_u, valid_elements
from vfl.alignment.ids import arrow_ids, bytes_and_offsets
from vfl.alignment.steps import COUNT, Receive, Send, Steps, Terms
from vfl.tables.cells import Misread
from vfl.tables.ids import ID_RULES, IdRule, Ids

ORDER = 2**252 + 27742317777372353535851937790883648493


# the group ---------------------------------------------------------------------------------------


def test_the_map_is_elligator_2_with_the_cofactor_cleared() -> None:
    """RFC 9380, J.4.2: u[0] and P.x of curve25519_XMD:SHA-512_ELL2_NU_, all five messages."""
    vectors = (
        (
            "608d892b641f0328523802a6603427c26e55e6f27e71a91a478148d45b5093cd",
            "1bb913f0c9daefa0b3375378ffa534bda5526c97391952a7789eb976edfe4d08",
        ),
        (
            "46f5b22494bfeaa7f232cc8d054be68561af50230234d7d1d63d1d9abeca8da5",
            "7c22950b7d900fa866334262fcaea47a441a578df43b894b4625c9b450f9a026",
        ),
        (
            "235fe40c443766ce7e18111c33862d66c3b33267efa50d50f9e8e5d252a40aaa",
            "31ad08a8b0deeb2a4d8b0206ca25f567ab4e042746f792f4b7973f3ae2096c52",
        ),
        (
            "001e92a544463bda9bd04ddbe3d6eed248f82de32f522669efc5ddce95f46f5b",
            "027877759d155b1997d0d84683a313eb78bdb493271d935b622900459d52ceaa",
        ),
        (
            "1a68a1af9f663592291af987203393f707305c7bac9c8d63d6a729bdc553dc19",
            "5fd892c0958d1a75f54c3182a18d286efab784e774d1e017ba2fb252998b5dc1",
        ),
    )
    for field_element, expected in vectors:
        point = crypto_core_ed25519_from_uniform(bytes.fromhex(field_element)[::-1])
        assert montgomery_u([point])[::-1].hex() == expected


def ladder(scalar: int, u: int) -> tuple[int, int]:
    """The projective u-coordinate of scalar·P, by the formulas of RFC 7748 without clamping."""
    x2, z2, x3, z3 = 1, 0, u, 1
    for bit in reversed(range(scalar.bit_length())):
        swap = scalar >> bit & 1
        if swap:
            x2, z2, x3, z3 = x3, z3, x2, z2
        a, b, c, d = x2 + z2, x2 - z2, x3 + z3, x3 - z3
        e = a * a - b * b
        x2, z2, x3, z3 = (
            a * a * b * b % FIELD,
            e * (a * a + 121665 * e) % FIELD,
            (d * a + c * b) ** 2 % FIELD,
            u * (d * a - c * b) ** 2 % FIELD,
        )
        if swap:
            x2, z2, x3, z3 = x3, z3, x2, z2
    return x2, z2


def test_hashes_are_points_of_the_prime_order_subgroup() -> None:
    for text in (b"a", b"b", b"customer-17", bytes(100)):
        u = int.from_bytes(hash_to_curve([text]), "little")
        right = (u**3 + 486662 * u * u + u) % FIELD
        assert pow(right, (FIELD - 1) // 2, FIELD) == 1  # on the curve, not on its twist
        assert ladder(ORDER, u)[1] == 0
    assert ladder(ORDER, 4)[1] != 0  # the check can fail: 4 is not of that order
    assert hash_to_curve([b"a"]) == hash_to_curve([b"a"]) != hash_to_curve([b"b"])


@settings(max_examples=10)
@given(st.binary(min_size=1), st.binary(min_size=32, max_size=32), st.binary(min_size=32, max_size=32))
def test_blinding_commutes(value: bytes, a: bytes, b: bytes) -> None:
    element = hash_to_curve([value])
    assert blind(a, blind(b, element, silent), silent) == blind(b, blind(a, element, silent), silent)


def test_lists_are_what_their_elements_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hashed and blinded in pieces, on several threads, and with one inversion for a whole piece."""
    monkeypatch.setattr(group, "PIECE", 3)
    told: list[int] = []
    values, key = [b"%d" % i for i in range(10)], bytes(range(32))
    one_by_one = b"".join(hash_to_curve([value]) for value in values)
    assert hash_to_curve(values) == one_by_one
    blinded = blind(key, one_by_one, told.append)
    assert blinded == hash_and_blind(key, values, silent) and told == [3, 3, 3, 1]
    private = X25519PrivateKey.from_private_bytes(key)  # of another library
    points = [one_by_one[i : i + ELEMENT] for i in range(0, len(one_by_one), ELEMENT)]
    assert blinded == b"".join(private.exchange(X25519PublicKey.from_public_bytes(point)) for point in points)
    with pytest.raises(ValueError, match="small order"):
        blind(key, one_by_one + bytes(ELEMENT), silent)


def test_values_that_end_in_zeros_are_told_apart() -> None:
    short, long = b"\x01" + bytes(31), b"\x01\x01" + bytes(30)
    lists = [np.frombuffer(b"".join(values), dtype=f"S{ELEMENT}") for values in ([long, short], [short], [short, long])]
    assert [found.tolist() for found in positions_in_all(lists)] == [[1], [0], [0]]
    assert [found.tolist() for found in positions_in_all([lists[0], lists[0][:0]])] == [[], []]


@pytest.mark.parametrize(
    "bad",
    [
        bytes(31),  # not an element
        FIELD.to_bytes(32, "little"),  # zero, not in canonical form
        (2**255 - 1).to_bytes(32, "little"),
        b"\x09" + bytes(30) + b"\x80",
        bytes([9] * 32) * 2,  # repeated
    ],
)
def test_malformed_lists_are_seen(bad: bytes) -> None:
    assert not valid_elements(bad)
    assert valid_elements((FIELD - 1).to_bytes(32, "little") + bytes([9] * 32))


# ids ---------------------------------------------------------------------------------------------


def test_ids_have_one_documented_encoding() -> None:
    assert encode_ids(["42", "042", "42 ", "é"]) == [b"42", b"042", b"42 ", "é".encode()]
    assert encode_ids([42, np.int64(7), b"x"]) == [b"42", b"7", b"x"]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (["secret", "b", "secret"], "rows 0 and 2 have the same id .1 repeated"),
        ([1, "1"], "rows 0 and 1 have the same id"),
        ([1.0], "row 0 has an id of type float"),
        (["a", None], "row 1 has an id of type NoneType"),
        ([True], "type bool"),
        (["a", ""], "length of the id in row 1 = 0"),
    ],
)
def test_bad_ids_are_refused_without_saying_them(ids: list[object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        encode_ids(ids)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("rule", ID_RULES)
@settings(max_examples=20, deadline=None)
@given(st.data())
def test_both_ways_compare_the_same_bytes_whatever_the_rule_is(rule: str, data: st.DataObject) -> None:
    """The one hashes Arrow's buffers, pieces of a column too, the other Python texts."""
    spelt = st.integers(0, 10**6).map(str) if rule == "integer" else st.text(st.characters(codec="utf-8"), min_size=1)
    texts = [text for text in data.draw(st.lists(spelt, min_size=1, unique=True)) if text == text.strip()]
    column = pa.chunked_array([texts], data.draw(st.sampled_from([pa.string(), pa.large_string()])))
    try:
        read, missing = IdRule(rule=rule).read(column)
    except Misread:
        return  # refused before anything is matched
    ids = Ids(read.filter(pa.array(~missing)))
    first = data.draw(st.integers(0, len(ids)))
    for part in (ids, Ids(ids.array.slice(first))):
        found, offsets = bytes_and_offsets(arrow_ids(part))
        assert [found[a:b].tobytes() for a, b in itertools.pairwise(offsets)] == encode_ids(list(part))


# the protocol ------------------------------------------------------------------------------------


def elements(messages: list[tuple[bytes, bytes]]) -> list[bytes]:
    return [data[i : i + ELEMENT] for kind, data in messages if kind == LIST for i in range(0, len(data), ELEMENT)]


id_lists = st.lists(st.text(min_size=1, max_size=8), unique=True, max_size=12)


@pytest.mark.parametrize("matching", MATCHINGS)
@settings(max_examples=12, deadline=None)
@given(st.lists(id_lists, min_size=2, max_size=4), st.sampled_from([None, 12, 15]), st.integers(0, 2**32))
def test_equals_the_plain_intersection_in_one_order(
    matching: str, sets: list[list[str]], pad_to: int | None, seed: int
) -> None:
    found = Exchange(sets, pad_to, seed, matching).run()
    orders = [[ids[row] for row in rows] for ids, rows in zip(sets, found.rows, strict=True)]
    assert all(order == orders[0] for order in orders)
    assert len(set(orders[0])) == len(orders[0])
    assert set(orders[0]) == set(sets[0]).intersection(*sets[1:])


def test_nothing_sent_contains_an_id_or_its_hash() -> None:
    sets = [[f"person number {i}" for i in range(start, start + 20)] for start in (0, 5, 10)]
    found = Exchange(sets).run()
    wire = b"".join(data for messages in found.sent for _, data in messages)
    for ids in sets:
        for value in encode_ids(ids):
            assert value not in wire and hash_to_curve([value]) not in wire


@pytest.mark.parametrize("clients", [2, 3, 5])
def test_a_member_sees_no_two_equal_values(clients: int) -> None:
    """All clients have the same ids, yet in a member's view (and with its own list) every value occurs once."""
    ids = [f"id {i}" for i in range(10)]
    found = Exchange([ids] * clients).run()
    for received, sent in zip(found.received[:-1], found.sent[:-1], strict=True):
        seen = [*elements(received), *elements(sent)]
        assert len(seen) == len(set(seen)) > 0


@pytest.mark.parametrize("clients", [2, 3])
def test_every_member_shuffles_every_list_it_passes_on(clients: int) -> None:
    """Otherwise the leader could tell by position which of its own ids another client has, or a member whose are
    whose."""
    sets = [[f"{i} of client {c}" for i in range(50)] for c in range(clients)]
    found = Exchange(sets, seed=3).run()
    for me in range(clients - 1):
        key = random.Random(f"3 {me}").randbytes(32)  # the first thing a client draws
        arrived = [data for kind, data in found.received[me] if kind == LIST]
        left = [data for kind, data in found.sent[me] if kind == LIST][1:]  # the first is its own
        assert len(arrived) == len(left) == clients - 1
        for before, after in zip(arrived, left, strict=True):
            blinded = blind(key, before, silent)
            straight = [blinded[i : i + ELEMENT] for i in range(0, len(blinded), ELEMENT)]
            back = [after[i : i + ELEMENT] for i in range(0, len(after), ELEMENT)]
            assert sorted(straight) == sorted(back)
            assert sum(a == b for a, b in zip(straight, back, strict=True)) < 10


@pytest.mark.parametrize("matching", MATCHINGS)
def test_padding_hides_the_number_of_ids(matching: str) -> None:
    common = [f"common {i}" for i in range(4)]

    def sizes(extra: int) -> list[list[tuple[bytes, int]]]:
        sets = [[*common, *(f"{c} {i}" for i in range(extra * (c + 1)))] for c in range(3)]
        return [
            [(kind, len(data)) for kind, data in sent]
            for sent in Exchange(sets, pad_to=40, matching=matching).run().sent
        ]

    assert sizes(1) == sizes(12)
    with pytest.raises(ValueError, match="number of ids = 41: must be at most 40; raise pad_to"):
        Exchange([[*range(41)], [1]], pad_to=40, matching=matching).run()


@pytest.mark.parametrize("matching", MATCHINGS)
def test_the_order_is_that_of_a_fresh_key(matching: str) -> None:
    ids = [f"id {i}" for i in range(30)]
    orders = [Exchange([ids, ids], seed=seed, matching=matching).run().rows[0].tolist() for seed in range(3)]
    assert orders[0] != orders[1] != orders[2] != orders[0]


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (bytes(32), "point of small order"),
        ((1).to_bytes(32, "little"), "point of small order"),
        (FIELD.to_bytes(32, "little"), "repeated or malformed"),
        (bytes([9] + [0] * 31) * 2, "repeated or malformed"),
        (bytes(33), "repeated or malformed"),
    ],
)
def test_the_leader_refuses_bad_points(payload: bytes, message: str) -> None:
    terms = Terms(("a", "b"), matching="ecdh")
    steps = leader(terms, ["x"], random.Random(0).randbytes, silent)
    assert isinstance(next(steps), Send)
    assert isinstance(next(steps), Receive)
    assert steps.send(bytearray(terms.encoded())) == Receive(0, LIST, 0, 320_000_000)
    with pytest.raises(AlignmentError, match=f"client 'a'.*{message}|list of client 'a'.*{message}"):
        steps.send(bytearray(payload))
        next(steps)


def count_at(steps: Steps, count: int) -> None:
    """The member has sent back the leader's list, and hears how many ids are common."""
    assert next(steps) == Receive(1, COUNT, 8, 8)
    assert steps.send(bytearray(count.to_bytes(8, "little"))) == Send(1, COUNT, b"")
    assert isinstance(next(steps), Receive)


@pytest.mark.parametrize("positions", [[0, 0], [2], [3], [2**32 - 1]])
def test_a_member_refuses_bad_positions(positions: list[int]) -> None:
    """Repeated, beyond its list, or of a padded entry (it has one id and one padded entry; 2 is beyond)."""
    terms = Terms(("a", "b"), 2, "ecdh")
    steps = member(terms, 0, ["x"], random.Random(0).randbytes, silent)
    next(steps)
    steps.send(bytearray(terms.encoded()))
    next(steps)
    assert isinstance(next(steps), Receive)
    data = hash_to_curve([b"1", b"2"])
    steps.send(bytearray(data))
    count_at(steps, len(positions))
    with pytest.raises(AlignmentError, match="client 'b' sent positions"):
        steps.send(bytearray(np.array(positions, dtype="<u4").tobytes()))


def test_a_matched_padded_entry_is_refused() -> None:
    """One of the two positions in the list is the id, the other a padded entry."""
    terms, ended = Terms(("a", "b"), 2, "ecdh"), []
    for position in (0, 1):
        steps = member(terms, 0, ["x"], random.Random(0).randbytes, silent)
        answers = (terms.encoded(), hash_to_curve([b"1", b"2"]), (1).to_bytes(8, "little"), bytes(4))
        for answer in answers:
            while isinstance(next(steps), Send):
                pass
            steps.send(bytearray(answer))
        assert isinstance(next(steps), Receive)
        try:
            steps.send(bytearray(np.array([position], dtype="<u4").tobytes()))
        except StopIteration as end:
            ended.append(end.value.tolist())
        except AlignmentError as error:
            ended.append(str(error))
    assert sorted(ended, key=str) == [[0], "client 'b' matched a padded entry: it does not follow the protocol"]


def test_terms_are_checked() -> None:
    for clients in (("a",), ("a", "a")):
        with pytest.raises(ValueError, match="clients = "):
            Terms(clients)
    with pytest.raises(ValueError, match="pad_to = 0"):
        Terms(("a", "b"), 0)
    with pytest.raises(ValueError, match="matching = 'plain'"):
        Terms(("a", "b"), matching="plain")


# oblivious transfers -----------------------------------------------------------------------------


def opened_by(leader_says: Callable[[dict[str, Any], list[str]], tuple[dict[str, Any], list[str]]]) -> Steps:
    """A member of ("a", "b") that has got as far as the leader's nonce, which ``leader_says`` may change."""
    terms = Terms(("a", "b"))
    steps = ot.align(terms, 0, arrow_ids(["x"]), random.Random(0).randbytes)
    nonce = "ab" * 32
    first = {"terms": terms.encoded().decode(), "ids": 1, "nonce": hashlib.blake2b(nonce.encode()).hexdigest()}
    assert next(steps) == Receive(1, ot.HELLO, 1, 1 << 16)
    answer = steps.send(bytearray(json.dumps(first).encode()))
    assert isinstance(answer, Send)
    opened, hellos = leader_says({"nonce": nonce}, [bytes(answer.payload).decode()])
    assert isinstance(next(steps), Receive)
    steps.send(bytearray(json.dumps({**opened, "hellos": hellos}).encode()))
    return steps


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda opened, hellos: ({"nonce": "cd" * 32}, hellos), "opened another nonce than it committed to"),
        (lambda opened, hellos: ({}, hellos), "opened another nonce than it committed to"),
        (lambda opened, hellos: (opened, [hellos[0].replace('"ids": 1', '"ids": 2')]), "repeats another greeting"),
        (lambda opened, hellos: (opened, hellos * 2), "repeats another greeting"),
    ],
)
def test_a_leader_that_chooses_its_nonce_late_is_refused(change: Any, message: str) -> None:
    """Else it could choose α, and with it the salt and the keys."""
    with pytest.raises(AlignmentRefused, match=f"client 'b' {message}"):
        opened_by(change)
    assert opened_by(lambda opened, hellos: (opened, hellos)) is not None


@pytest.mark.parametrize("point", [bytes(32), bytes([1, *bytes(31)]), b"\xff" * 32, bytes([2, *bytes(31)])])
def test_points_outside_the_group_are_refused_at_both_ends(point: bytes) -> None:
    coins = random.Random(1).randbytes
    with pytest.raises(AlignmentRefused, match="client 'x' sent a point that is not in the group of ed25519"):
        base_ot.answer(point, [0] * 512, b"label", coins, "x")
    secret, offered = base_ot.offer(coins)
    answered, keys = base_ot.answer(offered, [0, 1] * 256, b"label", coins, "x")
    pairs = base_ot.key_pairs(secret, offered, answered, b"label", "y")
    assert (
        keys == [pair[i % 2] for i, pair in enumerate(pairs)] and len({key for pair in pairs for key in pair}) == 1024
    )
    with pytest.raises(AlignmentRefused, match="client 'y' sent a point"):
        base_ot.key_pairs(secret, offered, answered[:-32] + point, b"label", "y")


def test_lists_in_several_bins_and_in_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """More bins than are under way at once, lists of different lengths, the smaller one of the member."""
    monkeypatch.setattr(okvs, "BIN", 5000)
    monkeypatch.setattr(okvs, "IN_MEMORY", 0)
    lists = [[f"p{i}" for i in range(20_000, 42_000)], [f"p{i}" for i in range(40_000)]]
    folded = okvs.Bins(arrow_ids(lists[0]), bytes(16), okvs.Shape(22_000, 8), tmp_path, silent)
    assert folded.filled.sum() == 22_000 and not list(tmp_path.iterdir())  # it has no name
    rows = sorted(row for number in range(8) for row in okvs.rows_of(folded[number]).tolist())
    assert rows == list(range(22_000))
    for sets in (lists, [*lists, lists[0][::-1]]):
        found = Exchange(sets, None, 3, "ot").run()
        orders = [[ids[row] for row in rows] for ids, rows in zip(sets, found.rows, strict=True)]
        assert all(order == orders[0] for order in orders)
        assert sorted(orders[0]) == sorted(f"p{i}" for i in range(20_000, 40_000))
