"""What one party sees does not depend on the secrets: a two-sample test on recorded transcripts.

``CASES`` has one line per primitive; ``transcripts`` explains the test. The same test must catch every planted leak:
each mask of each primitive is taken away in turn, and the coins of the comparison are fixed.
"""

import sys

import numpy as np
import pytest

import refmpc
from accel import kernels
from accel.prg import Stream
from refmpc import PROTOCOLS
from refmpc.core.party import Operation
from refmpc.core.rounds import Round
from refmpc.primitives import dealing
from refmpc.primitives.dealing import at_holders, held, row_segments, summands
from tests.refmpc.transcripts import Case, draws, finds_a_leak, leaks, watch_streams

shuffling = sys.modules["refmpc.primitives.shuffle"]
FAR = ((5,), (-(2**61) + 987654321,))
PAIR = ((3, 5), (-(2**30), 2**31 - 77))
BITS = ((0,), (1,))


def sign(high_bit, prime, secrets, idle=()):
    return Case(lambda party, x: refmpc.is_negative(x, 0, high_bit), ("arithmetic",), secrets, packed=prime, idle=idle)


def composed(call, one, two, **options):
    secrets = (round(one * 2**16),), (round(two * 2**16),)
    return Case(lambda party, x: call(x), ("arithmetic",), secrets, composed=True, **options)


def weighed(bits):
    return refmpc.weigh_bits([bits, ~bits], np.array([[1, 5], [3, -2], [0, 1]]))


def coarse(party, x, additive, width=3):
    spread = x.scale_by_integers(np.arange(1, x.shape[1] + 1))
    return refmpc.largest_coarse(summands(party, spread.first, 16) if additive else spread, 16, width)


# masks of tests that scale, turn and slots hide as well: "largest_coarse of two" sees them
TEST_MASKS = ((2, 2, 3),)


def below(party, z, largest):
    segments = row_segments(party, len(z))
    words = summands(party, largest.first, 2, segments)
    words.bits = 10
    return refmpc.exp_below(held(z, segments), words, 4)


def spline(party, m, t):
    segments = row_segments(party, len(m))
    one, other = (at_holders(each.reinterpret(bits), segments) for each, bits in ((m, 20), (t, 0)))
    return refmpc.spline_times(one, other, "root")


def scaled(party, v, x):
    return refmpc.scale_rows(at_holders(v), x.reshape(len(x), 1), 9, 1)


def squares(party, z, w):
    return refmpc.cut_and_square(summands(party, z.first.reshape(-1, 1), 16), 8, w)


def spline_alone(party, m):
    return refmpc.spline_times(at_holders(m.reinterpret(20)), None, "root")


def gate(bits, d, additive):
    return refmpc.gated(bits, summands(d.party, d.first, 16, bits.segments) if additive else d)


def reached(party, x, additive, ring=64):
    weights = [([3, 1, 5], True), ([0, 1, -1], False)]
    return refmpc.weigh_reached(summands(party, x.first, 16) if additive else x, [1, 40], [0, 3], 7, weights, ring)


PERMUTATIONS = tuple((pair, 1, 0) for pair in range(3))  # they stand still here: the masks alone must hide the rows
WEIGHTS, CUT = np.array([1, 2, 1]), 1
CASES = {
    "replicate": Case(lambda party, x: refmpc.replicate(at_holders(x)), ("arithmetic",), FAR),
    "truncate_additive": Case(
        lambda party, x: refmpc.truncate_additive(summands(party, x.first, 16), 16),
        ("arithmetic",),
        FAR,
        packed=2**16,
    ),
    "largest_coarse": Case(
        lambda party, x: coarse(party, x, False),
        ("arithmetic",),
        ((1,), (-2,)),
        packed={63: 5, 45: 5, 12: 16},
        rows_first=True,
        shape=(3,),
        idle=TEST_MASKS,
    ),
    "largest_coarse of summands": Case(
        lambda party, x: coarse(party, x, True),
        ("arithmetic",),
        ((1,), (-2,)),
        packed={63: 5, 45: 5, 12: 16},
        rows_first=True,
        shape=(3,),
        idle=TEST_MASKS,
    ),
    "largest_coarse of two": Case(
        lambda party, x: coarse(party, x, False, 2),
        ("arithmetic",),
        ((1,), (-2,)),
        packed={12: 5, 9: 5, 6: 8},
        rows_first=True,
        shape=(2,),
        idle=((2, 2, 1),),  # the scale, which three classes show
    ),
    "exp_below": Case(
        lambda party, z, largest: below(party, z.reshape(len(z), 1), largest),
        ("arithmetic",) * 2,
        ((-1, 0), (-17 << 16, 3)),
        packed={4: 16, 10: 2**10},
    ),
    "octave": Case(
        lambda party, s: refmpc.octave(at_holders(s), 4),
        ("arithmetic",),
        ((46000,), (255000,)),
        packed={32: 2**32, 2: 4},
    ),
    "spline_times": Case(spline, ("arithmetic",) * 2, ((1 << 20, 5), (9 << 18, -(2**24)))),
    "spline_times of one": Case(spline_alone, ("arithmetic",), ((1 << 20,), (9 << 18,)), packed=2**40),
    "scale_rows": Case(scaled, ("arithmetic",) * 2, ((3, 5), (2**62 + 12345, -(2**40)))),
    "cut_and_square": Case(squares, ("arithmetic",) * 2, ((3, 5), (-(2**61), 2**40)), packed=2**8),
    "weigh_reached": Case(lambda party, x: reached(party, x, False), ("arithmetic",), ((20,), (-60,)), packed=5),
    "weigh_reached of summands": Case(
        lambda party, x: reached(party, x, True), ("arithmetic",), ((20,), (-60,)), packed=5
    ),
    "weigh_reached in a small ring": Case(
        lambda party, x: reached(party, x, False, 27),
        ("arithmetic",),
        ((20,), (-60,)),
        packed=lambda name, bits: (2**27, False) if bits == 54 else (5, False),
    ),
    "clip_root": composed(lambda x: refmpc.clip_root(x, 1000.0), 0.5, 999.0),
    "clip_root that stops": composed(lambda x: refmpc.clip_root(x, 1000.0, True), 0.5, 1999.0),
    "probabilities": composed(lambda x: refmpc.probabilities(x * WEIGHTS, 2000.0), 0.0, 500.0, shape=(3,)),
    "probabilities of one class, weighted": composed(
        lambda x: refmpc.probabilities(x * WEIGHTS, 2000.0, 1, x[:, 0]), 0.0, 500.0, shape=(3,)
    ),
    "multiply": Case(lambda party, x, y: refmpc.multiply(x, y), ("arithmetic",) * 2, PAIR),
    "dot": Case(lambda party, x, y: refmpc.dot(x, y), ("arithmetic",) * 2, PAIR, shape=(2,)),
    "matmul": Case(lambda party, x, y: refmpc.matmul(x, y[:2, :1]), ("arithmetic",) * 2, PAIR, shape=(2,)),
    "multiply_truncate": Case(
        lambda party, x, y: refmpc.multiply_truncate(x, y, 16), ("arithmetic",) * 2, PAIR, packed=2**16
    ),
    "multiply_truncate by 30": Case(
        lambda party, x, y: refmpc.multiply_truncate(x, y, 30), ("arithmetic",) * 2, PAIR, packed=2**30
    ),
    "dot_truncate": Case(
        lambda party, x, y: refmpc.dot_truncate(x, y, 8), ("arithmetic",) * 2, PAIR, packed=2**8, shape=(1,)
    ),
    "matmul_truncate": Case(
        lambda party, x, y: refmpc.matmul_truncate(x, y[:1], 8), ("arithmetic",) * 2, PAIR, packed=2**8, shape=(1,)
    ),
    "truncate": Case(lambda party, x: refmpc.truncate(x, 16), ("arithmetic",), FAR, packed=2**16, idle=((0, 1, 0),)),
    "truncate by 40": Case(
        lambda party, x: refmpc.truncate(x, 40), ("arithmetic",), FAR, packed=2**40, idle=((0, 1, 0),)
    ),
    "is_negative": sign(63, 37, FAR),
    "is_negative of neighbours": sign(63, 37, ((0,), (-1,))),
    "is_negative of 16 bits": sign(16, 11, ((1,), (-(2**15) + 77,))),
    "is_negative of 4 bits": sign(4, 5, ((15,), (-16,))),
    "is_negative of one bit": sign(1, 5, ((0,), (-1,)), idle=((2, 1, 1), (2, 1, 3))),
    "relu": Case(lambda party, x: refmpc.relu(x, 0, 4), ("arithmetic",), ((1,), (-10,)), packed=5),
    "maximum": Case(
        lambda party, x: refmpc.maximum(x * WEIGHTS, 1, 0, 4), ("arithmetic",), ((1,), (-2,)), packed=5, shape=(3,)
    ),
    "select": Case(
        lambda party, b, d: refmpc.select(refmpc.two_holder(b), d), (1, "arithmetic"), ((0, 5), (1, -(2**61)))
    ),
    "gated": Case(lambda party, b, d: gate(refmpc.two_holder(b), d, False), (1, "arithmetic"), ((0, 5), (1, -(2**61)))),
    "gated, of summands": Case(
        lambda party, b, d: gate(refmpc.two_holder(b), d, True), (1, "arithmetic"), ((0, 5), (1, -(2**61)))
    ),
    "where": Case(
        lambda party, b, d: refmpc.where(refmpc.two_holder(b), d, 3), (1, "arithmetic"), ((0, 5), (1, -(2**61)))
    ),
    "bit_to_arithmetic": Case(lambda party, b: refmpc.bit_to_arithmetic(refmpc.two_holder(b)), (1,), BITS),
    "bit_to_arithmetic in two rounds": Case(
        lambda party, b: refmpc.bit_to_arithmetic(refmpc.two_holder(b), 2), (1,), BITS
    ),
    "bits_to_boolean": Case(lambda party, b: refmpc.bits_to_boolean(refmpc.two_holder(b)), (1,), BITS),
    "lookup": Case(lambda party, x: refmpc.lookup(x, np.arange(4) ** 9), ("arithmetic",), ((0,), (2**62 + 3,))),
    "lookup in two tables": Case(
        lambda party, x: refmpc.lookup(x, np.arange(4).reshape(2, 2)), ("arithmetic",), ((0,), (2**62 + 3,))
    ),
    "and_words": Case(lambda party, x, y: refmpc.and_words(x, y), (8, 8), ((0, 255), (255, 255)), packed=256),
    "is_negative_by_carry_tree": Case(lambda party, x: refmpc.is_negative_by_carry_tree(x), ("arithmetic",), FAR),
    "arithmetic_to_boolean": Case(lambda party, x: refmpc.arithmetic_to_boolean(x), ("arithmetic",), FAR),
    "boolean_to_arithmetic": Case(lambda party, x: refmpc.boolean_to_arithmetic(x), (64,), FAR),
    "equal": Case(lambda party, x, y: refmpc.equal(x, y), ("arithmetic",) * 2, ((5, 5), (5, -(2**61)))),
    "input_from_party": Case(
        lambda party, v: refmpc.input_from_party(party, 1, v, (4096,), 0), (("private", 1),), ((5,), (-(2**61),))
    ),
    "thermometer": Case(
        lambda party, x: refmpc.thermometer(x, [1, 16, 40], [0, 0, 3], 7), ("arithmetic",), ((20,), (-60,)), packed=5
    ),
    "weigh_bits": Case(lambda party, b: weighed(refmpc.two_holder(b)), (1,), BITS),
    "exp between bounds": Case(
        lambda party, x: refmpc.exp(x, 0.0, -20.0), ("arithmetic",), ((-5,), (-(19 << 16) + 99,)), packed=2**39
    ),
    "shuffle": Case(lambda party, x: refmpc.shuffle([x]), ("arithmetic",), FAR, idle=PERMUTATIONS),
    "shuffle of words": Case(lambda party, x: refmpc.shuffle([x]), (64,), FAR, idle=PERMUTATIONS),
    "shuffle of two tensors": Case(
        lambda party, x, y: refmpc.shuffle([x, y]), ("arithmetic",) * 2, PAIR, idle=PERMUTATIONS
    ),
    "polynomial": composed(lambda x: refmpc.polynomial(x, [1.0, 0.5, 0.25, 0.125]), 0.1, -1.5),
    "reciprocal": composed(lambda x: refmpc.reciprocal(x, 0.25, 16.0), 0.5, 15.0),
    "reciprocal, signed": composed(lambda x: refmpc.reciprocal(x, 0.25, 16.0, 20, True), 0.5, -15.0),
    "reciprocal_narrow": composed(lambda x: refmpc.reciprocal_narrow(x, 1.0, 13.0), 1.0, 12.5),
    "divide": composed(lambda x: refmpc.divide(x, x, 0.25, 16.0), 0.5, 15.0),
    "inverse_sqrt": composed(lambda x: refmpc.inverse_sqrt(x, 0.25, 16.0), 0.5, 15.0),
    "sqrt": composed(lambda x: refmpc.sqrt(x, 0.25, 16.0), 0.0, 15.0),
    "clip_factor": composed(lambda x: refmpc.clip_factor(x, 1000.0), 0.5, 999.0),
    "exp": composed(lambda x: refmpc.exp(x), 0.0, -1000.0),
    "log": composed(lambda x: refmpc.log(x, 0.25, 16.0), 0.5, 15.0),
    "softmax": composed(lambda x: refmpc.softmax(x * WEIGHTS), 0.0, 500.0, shape=(3,)),
    # two secrets with one product: everybody learns the product, and nothing else
    "open_words": Case(
        lambda party, x, y: refmpc.open_words(party, opened_product(x, y), CUT, "example"),
        ("arithmetic",) * 2,
        ((3 << 20, 4 << 20), (2 << 20, 6 << 20)),
    ),
    # two secrets with one sum
    "open_words of a tensor": Case(
        lambda party, x, y: refmpc.open_words(party, refmpc.tensor_opening(x + y, CUT).reshape(-1), CUT, "example"),
        ("arithmetic",) * 2,
        ((3 << 20, 4 << 20), (6 << 20, 1 << 20)),
    ),
    "reveal": Case(lambda party, x: refmpc.reveal(x, "example", to=1), ("arithmetic",), FAR, learns=(1,)),
}


def opened_product(x, y):
    """This server's words of every x times the first y."""
    return refmpc.matmul_opening(x.reshape(-1, 1), y[:1].reshape(1, 1), CUT).reshape(-1)


# joint_gaussian uses the ANDs of the circuits; test_gaussian.py asks what its messages tell about the sample
WITHOUT_INPUT = {"joint_gaussian"}


@pytest.fixture(autouse=True)
def _watched(monkeypatch):
    watch_streams(monkeypatch)


@pytest.fixture(autouse=True)
def _one_dealer(monkeypatch):
    """All rows of a run have one dealer, so that every message has all elements."""
    monkeypatch.setattr(dealing, "FEWEST_ROWS", 10**9)


@pytest.fixture(autouse=True)
def _unmoved_rows(monkeypatch):
    """Shuffles draw their permutations but leave the rows in place, so that messages can be compared row by row."""
    draw = shuffling._permutations

    def unmoved(operation, role, rows):
        return {name: refmpc.seal(np.arange(rows)) for name in draw(operation, role, rows)}

    monkeypatch.setattr(shuffling, "_permutations", unmoved)


def test_every_primitive_has_a_case():
    assert {name.split()[0].rstrip(",") for name in CASES} | WITHOUT_INPUT == set(PROTOCOLS), (
        "add one line to CASES for each new primitive"
    )


@pytest.mark.parametrize("name", CASES)
def test_what_a_party_sees_is_independent_of_the_secrets(name):
    assert leaks(CASES[name]) == []


# planted leaks ----------------------------------------------------------------------------------

CIRCUITS = ("is_negative_by_carry_tree", "arithmetic_to_boolean", "boolean_to_arithmetic", "equal")


@pytest.mark.parametrize(
    "name", [name for name, case in CASES.items() if name not in ("reveal", "truncate by 40") and not case.composed]
)
def test_every_single_mask_is_missed_when_it_is_taken_away(name):
    """Each draw from a pair stream is set to zero at both of its owners in turn (of the many draws of a circuit, every
    fourth): the test must notice. Draws that hide nothing are listed with the case."""
    case = CASES[name]
    drawn = draws(case)
    assert drawn
    survivors = [
        d for d in drawn[:: 4 if name in CIRCUITS else 1] if d not in case.idle and not finds_a_leak(case, lost_mask=d)
    ]
    assert survivors == []


@pytest.mark.parametrize(
    "name", ["multiply", "multiply_truncate", "truncate", "is_negative of 4 bits", "select", "equal"]
)
def test_the_finder_of_leaks_does_not_cry_wolf(name):
    assert not finds_a_leak(CASES[name], seeds=range(1, 3))


def mask_known_to_the_receiver(monkeypatch):
    def zero_share(self, shape, kernel="subtract"):
        return refmpc.seal(-self.stream("previous").words(int(np.prod(shape))).reshape(shape))

    monkeypatch.setattr(Operation, "zero_share", zero_share)


def short_mask(monkeypatch):
    def zero_share(self, shape, kernel="subtract"):
        count = int(np.prod(shape))
        few = np.uint64(2**60 - 1)  # the four highest bits stay open
        with_next, with_previous = (self.stream(side).words(count) & few for side in ("next", "previous"))
        return refmpc.seal((with_next - with_previous).reshape(shape))

    monkeypatch.setattr(Operation, "zero_share", zero_share)


def one_mask_for_two_values(monkeypatch):
    rows = Stream.rows

    def high_bits_as_low_bits(self, number, count):
        drawn = rows(self, number, count)
        if number == 3:
            drawn[2] = (drawn[2] & np.uint64(2**16 - 1)) * np.uint64(1 + (1 << 48))
        return drawn

    monkeypatch.setattr(Stream, "rows", high_bits_as_low_bits)


def a_biased_coin(monkeypatch):
    """The coin of the comparison comes up heads three times in four."""
    reply = kernels.compare_reply

    def biased(c, threshold, halves, coins, scale, mask, rotation, *rest):
        return reply(c, threshold, halves, coins & (rotation & np.uint8(1)), scale, mask, rotation, *rest)

    monkeypatch.setattr(kernels, "compare_reply", biased)


def blinding_by_few_factors(monkeypatch):
    reply = kernels.compare_reply

    def blinded(c, threshold, halves, coins, scale, *rest):
        few = (scale & np.uint8(1)) + np.uint8(1)
        return reply(c, threshold, halves, coins, few, *rest)  # factors 2 or 3, never 1 or 4

    monkeypatch.setattr(kernels, "compare_reply", blinded)


def a_column_in_the_clear(monkeypatch):
    """The dealer of a look-up sends one column of its vector without a mask."""
    send = Round.send_previous

    def leaky(self, *arrays):
        for array in arrays:
            if array.ndim == 2 and array.shape[1] == 4:
                refmpc.unseal(array)[:, 2] &= np.uint64(1)
        send(self, *arrays)

    monkeypatch.setattr(Round, "send_previous", leaky)


def a_word_in_the_clear(monkeypatch):
    """The dealer of weighed bits masks only the low half of its words."""
    send = Round.send_previous

    def leaky(self, *arrays):
        for array in arrays:
            if self.operation in ("weigh_bits", "weigh_reached") and array.dtype == np.uint64:
                refmpc.unseal(array)[:] &= np.uint64(2**32 - 1)
        send(self, *arrays)

    monkeypatch.setattr(Round, "send_previous", leaky)


def one_coin_for_all_thresholds(monkeypatch):
    """The holders use the same β for every threshold: the dealer's own bits then tell how many are reached."""
    draw = Stream.bytes
    first: dict[Stream, np.ndarray] = {}

    def again(self, count):
        return first.setdefault(self, draw(self, count)) if count == 4096 else draw(self, count)

    monkeypatch.setattr(Stream, "bytes", again)


def exp_with_a_short_mask(monkeypatch):
    """The dealer's vector of e^−ρ, which has up to 33 bits, gets a mask of 48 bits instead of 64."""
    send = Round.send_previous

    def leaky(self, *arrays):
        for array in arrays:
            if self.operation in ("exp", "exp_below") and array.ndim == 2:
                refmpc.unseal(array)[:] &= np.uint64(2**48 - 1)
        send(self, *arrays)

    monkeypatch.setattr(Round, "send_previous", leaky)


def shuffle_without_r(monkeypatch):
    """Role 0 sends its rows permuted but not masked."""
    words = Stream.words
    seen: dict[Stream, int] = {}

    def unmasked(self, count):
        seen[self] = seen.get(self, 0) + 1
        drawn = words(self, count)
        return np.zeros_like(drawn) if seen[self] == 2 else drawn  # the first draw is the permutation

    monkeypatch.setattr(Stream, "words", unmasked)


def slots_that_stand_still(monkeypatch):
    """The classes keep their places: the dealer sees their order."""
    monkeypatch.setattr(
        kernels, "order_shuffle", lambda draws, out: np.copyto(out, np.arange(out.shape[1], dtype=np.uint8))
    )


def slots_that_only_turn(monkeypatch):
    """A rotation of the classes instead of a permutation: the dealer sees all pairs."""

    def turned(draws, out):
        out[:] = (np.arange(out.shape[1]) + draws[-1][:, np.newaxis]) % out.shape[1]

    monkeypatch.setattr(kernels, "order_shuffle", turned)


def a_spline_with_a_short_mask(monkeypatch):
    """Dealt words of 17 bits get masks of 48."""
    send = Round.send_previous

    def leaky(self, *arrays):
        for array in arrays:
            if self.operation == "spline_times" and array.ndim == 3:
                refmpc.unseal(array)[:] &= np.uint64(2**48 - 1)
        send(self, *arrays)

    monkeypatch.setattr(Round, "send_previous", leaky)


PLANTED = [
    ("largest_coarse", slots_that_stand_still),
    ("largest_coarse", slots_that_only_turn),
    ("exp_below", exp_with_a_short_mask),
    ("probabilities", exp_with_a_short_mask),
    ("spline_times", a_spline_with_a_short_mask),
    ("clip_root", a_spline_with_a_short_mask),
    ("weigh_reached", a_biased_coin),
    ("thermometer", one_coin_for_all_thresholds),
    ("thermometer", a_biased_coin),
    ("exp between bounds", exp_with_a_short_mask),
    ("exp", exp_with_a_short_mask),
    ("softmax", exp_with_a_short_mask),
    ("shuffle", shuffle_without_r),
    ("shuffle of words", shuffle_without_r),
    ("weigh_bits", a_word_in_the_clear),
    ("reciprocal", a_word_in_the_clear),
    ("clip_factor", a_word_in_the_clear),
    ("multiply", mask_known_to_the_receiver),
    ("matmul", mask_known_to_the_receiver),
    ("multiply", short_mask),
    ("multiply_truncate", one_mask_for_two_values),
    ("truncate", one_mask_for_two_values),
    ("is_negative", a_biased_coin),
    ("is_negative of 4 bits", a_biased_coin),
    ("is_negative of 4 bits", blinding_by_few_factors),
    ("lookup", a_column_in_the_clear),
]


@pytest.mark.parametrize("name, plant", PLANTED, ids=lambda v: getattr(v, "__name__", v))
def test_a_planted_leak_is_caught_by_the_same_test(name, plant, monkeypatch):
    plant(monkeypatch)
    assert any(leaks(CASES[name], seed=seed, turns=(0,)) for seed in range(1, 5))


def test_what_a_client_sends_tells_a_server_nothing():
    """Servers 1 and 2 receive a correction: uniform, whatever the client shared, also after adding their own seeds."""
    seen = []
    for value in (5, -(2**61)):
        with pytest.warns(UserWarning, match="insecure_record"):
            run = refmpc.run(
                lambda party: refmpc.unseal(refmpc.input_from_client(party, "bank", (4096,), 0).shares),
                clients={"bank": (lambda client, v: client.share(np.full(4096, v), 0), value)},
                insecure_record=True,
            )
        seen.append(run)
    for party in (1, 2):
        for run in seen:
            received = [message for _, peer, message in run.transcripts[party] if peer == "bank"]
            assert sorted(message.nbytes for message in received) == [32, 8 * 4096]
            correction = max(received, key=lambda message: message.size)
            mine = run.outputs[party][0 if party == 1 else 1]
            for words in (correction, correction + mine, correction - mine):
                counts = np.bincount((words >> np.uint64(60)).astype(int), minlength=16)
                assert ((counts - 256) ** 2 / 256).sum() < 80
    assert all(np.unique(run.outputs[0]).size == 2 * 4096 for run in seen)
