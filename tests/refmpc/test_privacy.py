"""What one party sees does not depend on the secrets: a two-sample test on recorded transcripts.

``privacy_cases`` has one line per primitive; ``transcripts`` explains the test. The same test must catch every planted
leak: each mask of each primitive is taken away in turn, and the coins of the comparison are fixed.
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
from tests.refmpc.privacy_cases import CASES
from tests.refmpc.transcripts import draws, finds_a_leak, leaks, watch_streams

shuffling = sys.modules["refmpc.primitives.shuffle"]

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
    together = {part for name in CASES for part in name.split(", ") if part in PROTOCOLS}
    assert {name.split()[0].rstrip(",") for name in CASES} | together | WITHOUT_INPUT == set(PROTOCOLS), (
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
