"""The low-round primitives over their declared domains: exactness, errors, edges, every rounding."""

import itertools
import math
from typing import Any

import numpy as np
import pytest

import refmpc
from refmpc import RangeError
from refmpc.mathematics.clipping import ClipConstants
from refmpc.mathematics.exp_below import digit_sizes
from refmpc.mathematics.octave import octave_top
from refmpc.mathematics.probabilities import high_bits, order_width
from refmpc.primitives.dealing import Dealing, at_holders, row_segments, row_sizes, summands
from tests.refmpc.harness import Secret, evaluate, opened
from tests.refmpc.rounding import down, forced, forced_openings, up

BOUND = 31467.3  # the logits of the benchmark's plan
CLASSES = (2, 3, 10, 12, 13, 26, 64)
KINDS = ("normal", "ties", "huge", "edges", "near")


def logits(seed, rows, classes, kind, bound=BOUND):
    rng = np.random.default_rng(seed)
    bound *= 0.9999
    if kind == "normal":
        return rng.normal(size=(rows, classes)) * rng.choice([0.1, 1, 3, 10], size=(rows, 1))
    if kind == "ties":
        return rng.integers(-2, 3, (rows, classes)) / 4.0
    if kind == "huge":
        return rng.uniform(-bound, bound, (rows, classes))
    if kind == "edges":
        steps = [-bound, bound, 0.0, bound - 0.25, bound - 16, bound - 15.99, 0.25, -0.25, -16]
        return rng.choice(steps, (rows, classes))
    base = rng.uniform(-bound + 40, bound - 40, (rows, 1))
    return base + rng.uniform(-36, 36, (rows, classes)) * rng.choice([1e-4, 0.01, 0.3, 1], (rows, 1))


def words_of(values, bits):
    return np.rint(np.asarray(values) * 2.0**bits).astype(np.int64)


def softmax(z):
    e = np.exp(z - z.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def as_summands(party, x, segments=None):
    return summands(party, x.first, x.fraction_bits, segments)


# order -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", CLASSES)
@pytest.mark.parametrize("additive", [True, False])
def test_the_largest_is_exactly_the_largest_of_the_coarse_numbers(classes, additive):
    bits, width = 46, order_width(2 * BOUND)
    for seed, kind in enumerate(KINDS):
        z = words_of(logits(seed, 40, classes, kind), bits)

        async def program(party, x):
            return list(await refmpc.largest_coarse(as_summands(party, x) if additive else x, 2, width))

        two_holder, largest = opened(program, Secret(z, bits), seed=seed)
        assert np.array_equal(two_holder.words.view(np.int64), z)
        # the definite coarse numbers, from c and ρ as the parties hold them
        sizes, found, start = row_sizes(40), [], 0
        dealers = [next(d for d in range(3) if _deals(two_holder.shares, d, s)) for s in _stretches(sizes)]
        for size, dealer in zip(sizes, dealers, strict=True):
            at = slice(start, start + size)
            c, rho = two_holder.shares[(dealer + 1) % 3][at], two_holder.shares[dealer][at]
            found.append((c >> np.uint64(bits - 2)) - (rho >> np.uint64(bits - 2)))
            start += size
        coarse = _signed(np.concatenate(found), width + 1)
        assert np.array_equal(_signed(largest.words, width + 1), coarse.max(axis=1))
        assert np.abs(_signed(largest.words, width + 1) / 4 - z.max(axis=1) * 2.0**-bits).max() <= 0.25


def _stretches(sizes):
    ends = np.cumsum([0, *sizes])
    return [slice(a, b) for a, b in itertools.pairwise(ends)]


def _deals(shares, dealer, at):
    return np.array_equal(shares[(dealer + 1) % 3][at], shares[(dealer + 2) % 3][at])


def _signed(words, bits):
    return (words << np.uint64(64 - bits)).view(np.int64) >> (64 - bits)


def test_every_test_of_every_pair_has_a_mask_a_scale_and_a_turn_of_its_own(monkeypatch):
    """What both holders hand to the kernel, drawn alike: no line and no column is another one again, and every value
    comes up."""
    given: dict[int, list[Any]] = {}
    call = Dealing.call

    def watched(self, kernel, *arguments):
        if kernel == "order_reply":
            drawn = [np.array(refmpc.unseal(each)) for each in arguments[3:6]]
            given.setdefault(self.operation.number, []).append((drawn, arguments[7]))
        call(self, kernel, *arguments)

    async def program(party, x):
        return (await refmpc.largest_coarse(x, 0, 18))[1]

    monkeypatch.setattr(Dealing, "call", watched)
    opened(program, Secret(np.random.default_rng(1).integers(0, 2**17, (400, 3))))
    for (one, prime), (other, _) in given.values():
        assert all(np.array_equal(*both) for both in zip(one, other, strict=True))
        scale, mask, turn = one
        for lines, bound in ((scale, prime - 1), (mask, prime), (turn[None], len(mask))):
            often = np.bincount(lines.reshape(-1), minlength=bound) / lines.size
            assert len(often) == bound and np.abs(often - 1 / bound).max() < 6 / np.sqrt(bound * lines.size)
            pairs = [(lines[s], lines[t]) for s, t in itertools.combinations(range(len(lines)), 2)]
            for left, right in [*pairs, (lines[:, 1:], lines[:, :-1]), (lines[:, 3:], lines[:, :-3])]:
                assert abs(np.mean(left == right) - 1 / bound) < 6 / np.sqrt(bound * left.size)
    assert sum(masks.shape[1] for ((_, masks, _), _), _ in given.values()) == 400 * 3


@pytest.mark.parametrize("width", [1, 2, 3, 7, 18, 40, 59])
def test_the_order_of_any_width(width):
    """Differences up to 2^width − 1 of integers, whose coarse grid is their own."""
    rng = np.random.default_rng(width)
    z = rng.integers(0, 2**width, (60, 4))
    z[:5] = [0, 0, 2**width - 1, 2**width - 1]

    async def program(party, x):
        return (await refmpc.largest_coarse(x, 0, width))[1]

    assert np.array_equal(_signed(opened(program, Secret(z)).words, width + 1) % 2 ** (width + 1), z.max(axis=1))


def test_more_than_twelve_classes_are_ordered_in_groups_of_about_their_root():
    from refmpc.primitives.order import order_groups

    for classes in range(2, 65):
        groups = order_groups(classes)
        assert sum(groups) == classes and max(groups) <= 12 and (len(groups) == 1) == (classes <= 12)
        assert min(groups) >= 2 and max(groups) - min(groups) <= 1


# exp ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("high", [2, 3, 8, 12, 15, 16, 20, 32])
@pytest.mark.parametrize("bits", [16, 12, 26])
def test_exp_below_zero_over_its_whole_domain(high, bits):
    rng = np.random.default_rng(high)
    most = 2.0 ** (high + 4) - 17
    x = np.concatenate(
        [
            -rng.uniform(0.26, 20, 120),
            -np.array([0.25, 0.26, 1, 15.9, 15.9999, 16, 16.0001, 17, 31.99, 32, 32.01, 47.9, 48, most, most / 2]),
            -rng.uniform(0.26, most, 60),
        ]
    )
    x = np.maximum(x, -most).reshape(-1, 3)
    z = words_of(x + 100.25, bits)  # the largest is 100, so e^(z − 100 − 1/4) = e^x
    unit, ring = 2, high + 20 - 14 + 2
    largest = np.full(len(x), 400)

    async def program(party, z, largest):
        segments = row_segments(party, len(x))
        two_holder = refmpc.primitives.dealing.held(z, segments)
        coarse = summands(party, largest.first, unit, segments)
        coarse.bits = max(ring, 24)
        return await refmpc.exp_below(two_holder, coarse, high)

    e = opened(program, Secret(z, bits), Secret(largest)).signed * 2.0**-57
    exact = z * 2.0**-bits - 100.25
    true = np.exp(exact)
    grid = 0.0 if bits <= 16 else 2.0**-16
    allowed = true * (2.0**-17.9 + grid) + 2.0**-18
    assert (np.abs(e - true)[exact > -16] <= allowed[exact > -16]).all()
    between = (exact <= -16) & (exact > -32 - grid)
    assert ((e >= 0) & (e <= 2.0**-18 + 2.0**-23))[between].all()
    assert (e[exact < -32 - 2 * grid] == 0).all()


def test_digits_of_exp_are_two_up_to_sixteen_bits_and_more_beyond():
    assert digit_sizes(2) == (1, 1) and digit_sizes(12) == (6, 6) and digit_sizes(15) == (7, 8)
    assert digit_sizes(17) == (5, 6, 6) and digit_sizes(24) == (8, 8, 8) and digit_sizes(32) == (8, 8, 8, 8)
    with pytest.raises(ValueError, match="bound the logits"):
        digit_sizes(33)


# octave, spline ----------------------------------------------------------------------------------


@pytest.mark.parametrize("most", CLASSES)
def test_the_octave_of_every_sum_has_a_mantissa_from_one_to_nine_quarters(most):
    rng = np.random.default_rng(most)
    near = [
        k + d
        for k in [*2.0 ** np.arange(0, octave_top(most) + 1), 0.75, 1.5]
        for d in (-0.126, -1e-9, 0, 1e-9, 0.124, 0.126)
    ]
    s = np.concatenate([[0.6066, 0.61, most - 1e-9], near, rng.uniform(0.6066, most, 150)])
    s = words_of(s[(s > 0.6065) & (s < most)], 57)

    async def program(party, x):
        segments = row_segments(party, len(s))
        return list(await refmpc.octave(at_holders(x, segments), most))

    m, t = opened(program, Secret(s, 57))
    top = octave_top(most)
    assert np.array_equal(m.words, t.words * s.view(np.uint64))  # exact
    mantissa = m.words * 2.0 ** -(57 + top)  # as unsigned words
    assert mantissa.min() >= 1 and mantissa.max() < 2.25
    assert set(t.words.tolist()) <= {2**k for k in range(top + 2)}


@pytest.mark.parametrize("function, allowed", [("reciprocal", 2.0**-16.5), ("root", 2.0**-17.94)])
@pytest.mark.parametrize("scale", [20, 50, 62])
def test_the_spline_keeps_its_error_over_its_interval(function, allowed, scale):
    low, high = 15 << (scale - 4), (9 << (scale - 2)) - 1
    rng = np.random.default_rng(scale)
    m = np.array([low + (high - low) * i // 4000 for i in range(4001)], dtype=np.uint64).view(np.int64)
    m[1:-1] += rng.integers(0, max(1, (high - low) // 5000), m.size - 2)
    t = rng.integers(-(2**24), 2**24, m.size)
    t[:4] = 1, -1, 2**24, 0

    async def program(party, m, t):
        segments = row_segments(party, m.size)
        return await refmpc.spline_times(at_holders(m, segments), at_holders(t, segments), function)

    v = opened(program, Secret(m, scale), Secret(t)).signed.astype(np.float64) * 2.0**-38
    value = m.view(np.uint64) * 2.0**-scale
    true = t / value if function == "reciprocal" else t / np.sqrt(value)
    error = np.abs(v - true)[t != 0] / np.abs(true[t != 0])
    assert error.max() <= allowed
    assert (v[t == 0] == 0).all()


def test_roots_and_reciprocals_are_worked_out_without_fused_operations():
    """The words of both holders come from kernels: numpy rounds every operation, and the compiled kernel has the
    same."""
    import accel

    rng = np.random.default_rng(1)
    c, c_t = rng.integers(0, 2**64, (2, 20_000), dtype=np.uint64)
    halves = rng.integers(0, 2**64, (20_000, 2, 40), dtype=np.uint64)
    for scale in (18, 42, 57, 62):
        for function in (0, 1):
            found = []
            for name in ("numpy", "numba"):
                out = np.empty(20_000, dtype=np.uint64)
                accel.backend(name).spline_hold(c, c_t, halves, scale, function, out)
                found.append(out)
            assert np.array_equal(found[0], found[1])


# scale_rows, squares -----------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [1, 18, 40, 62])
def test_rows_are_scaled_by_the_quotient_or_one_more(bits):
    rng = np.random.default_rng(bits)
    edges = [0, 1, 2**bits - 1, 2**bits, 2**bits + 1, 2**62, 2**63 - 1, 2**63 - 2**bits]
    v = np.array([*edges, *(rng.integers(0, 2**63 - 1, 92) >> rng.integers(0, 40, 92))], dtype=np.int64)
    x = rng.integers(-(2**20), 2**20, (v.size, 3))
    x[:, 0] = 1

    async def program(party, v, x):
        return await refmpc.scale_rows(at_holders(v, row_segments(party, len(x))), x, bits, 1)

    u = opened(program, Secret(v, 38), Secret(x, 15)).signed
    quotient = u[:, 0] + 1
    assert ((quotient == v >> bits) | ((quotient == (v >> bits) + 1) & (v & ((1 << bits) - 1) != 0))).all()
    assert np.array_equal(u.view(np.uint64), ((quotient - 1)[:, np.newaxis] * x).view(np.uint64))


@pytest.mark.parametrize("bits", [1, 25, 33, 61])
def test_squares_are_those_of_the_very_integers_that_were_cut(bits):
    rng = np.random.default_rng(bits)
    z = rng.integers(-(2**62), 2**62, (50, 4)) >> rng.integers(0, 50, (50, 4))
    z[0] = -(2**62), 2**62 - 1, 0, -1
    weights = rng.integers(0, 2**30, 50)

    async def program(party, z, n):
        return list(await refmpc.cut_and_square(as_summands(party, z), bits, n))

    delta, q = opened(program, Secret(z, 40), Secret(weights, 12))
    cut = delta.signed - (z >> bits)
    assert ((cut == 0) | ((cut == 1) & (z & ((1 << bits) - 1) != 0))).all()
    squares = (delta.words * delta.words).sum(axis=1, dtype=np.uint64)
    assert np.array_equal(q.words, squares * weights.view(np.uint64))


# clip --------------------------------------------------------------------------------------------


def near_powers(seed, high, bits, count=150):
    rng = np.random.default_rng(seed)
    powers = [2.0**k * f for k in range(math.ceil(math.log2(high)) + 1) for f in (15 / 16, 1.0)]
    kink = [1 - 2.0**-19, 1 - 2.0**-18, 1 - 2.0**-17, 1 + 2.0**-19, 0.5, 0.0, -0.5, -high]
    values = np.concatenate([kink, powers, np.exp2(rng.uniform(-2, math.log2(high), count)), [high]])
    words = np.concatenate([words_of(values, bits) + d for d in (-1, 0, 1)])
    return np.unique(words[np.abs(words) <= high * 2.0**bits])


@pytest.mark.parametrize(
    "bits, high", [(42, 260.27), (42, 2.0), (30, 2.0**20), (26, 2.0**30), (42, 2.0**19), (16, 3.0)]
)
@pytest.mark.parametrize("rounding", ["as it comes", "up", "down"])
def test_the_clip_is_never_above_and_little_below(bits, high, rounding, monkeypatch):
    if rounding != "as it comes":
        forced_openings(monkeypatch, rounding == "up")
    constants = ClipConstants(bits, high)
    clip_bits = 18 + math.ceil((constants.octaves - 1) / 2)
    q = near_powers(bits, high, bits)
    ones = np.ones((q.size, 1), dtype=np.int64)

    async def program(party, q, x):
        factor = await refmpc.clip_root(as_summands(party, q), high)
        return [factor, await refmpc.scale_rows(factor, x, 62 - clip_bits, 1)]

    root, factor = opened(program, Secret(q, bits), Secret(ones))
    # exactly: factor ≤ 1/sqrt(max(1, q)) in integers
    for c, v, word in zip(factor.signed[:, 0].tolist(), root.signed.tolist(), q.tolist(), strict=True):
        square = max(word, 1 << bits)
        assert c * c * square <= 1 << (2 * clip_bits + bits)
        assert v * v * square <= 1 << (124 + bits)
    true = 1 / np.sqrt(np.maximum(1.0, q * 2.0**-bits))
    loss = 1 - factor.signed[:, 0] * 2.0**-clip_bits / true
    assert loss.max() <= constants.largest_loss(clip_bits)


@pytest.mark.parametrize("bits, high", [(42, 260.27), (40, 255.9), (40, 240.0), (42, 2.0), (30, 2.0**20), (30, 3.8)])
def test_a_clip_that_stops_is_zero_where_it_was_told_and_nowhere_else(bits, high):
    """Also for q in the last sixteenth below a power of two, which a comparison may take for the power."""
    constants = ClipConstants(bits, high, stops=True)
    q = near_powers(bits, high, bits)
    q = np.concatenate([q[q >= 0], words_of(np.linspace(0.93 * high, high, 400), bits)])
    told = q + (1 << constants.stop)

    async def program(party, q):
        return await refmpc.clip_root(as_summands(party, q), high, True)

    factor = opened(program, Secret(np.concatenate([q, told]), bits), insecure_check_ranges=True).signed
    counted = factor[: len(q)] * 2.0**-62
    true = 1 / np.sqrt(np.maximum(1.0, q * 2.0**-bits))
    assert not factor[len(q) :].any()
    assert (counted <= true).all()
    assert (1 - counted / true).max() <= constants.largest_loss(40)


def test_the_loss_of_the_clip_as_stated():
    assert ClipConstants(42, 260.27).largest_loss(22) < 2.0**-15.6
    assert ClipConstants(30, 2.0**20).largest_loss(28) < 2.0**-13.6


def test_the_constants_of_the_clip_are_floors_and_refuse_what_does_not_fit():
    for k, root in enumerate(ClipConstants(30, 2.0**30).roots):
        # root ≤ (1 − 2^-17)·2^(24 − k/2) < root + 1, squared in integers
        bound = (2**17 - 1) ** 2 << 48
        assert root * root << (34 + k) <= bound < (root + 1) ** 2 << (34 + k)
    with pytest.raises(ValueError, match="fewer fraction bits"):
        ClipConstants(42, 2.0**20)


# softmax -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", CLASSES)
@pytest.mark.parametrize("bound, bits", [(BOUND, 46), (60.0, 30), (1e8, 20), (3e10, 18), (300.0, 12)])
def test_probabilities_are_right_for_every_kind_of_logits(classes, bound, bits):
    for seed, kind in enumerate(KINDS):
        z = words_of(logits(seed, 30, classes, kind, bound), bits)
        z = np.clip(z, -int(bound * 2**bits), int(bound * 2**bits))

        async def program(party, x):
            return await refmpc.probabilities(as_summands(party, x), 2 * bound)

        p = opened(program, Secret(z, bits), seed=seed).value
        assert np.abs(p - softmax(z * 2.0**-bits)).max() < 2.0**-15


@pytest.mark.parametrize("classes", [2, 10, 26])
@pytest.mark.parametrize("choose", [up, down])
def test_probabilities_are_right_when_everything_rounds_one_way(classes, choose, monkeypatch):
    forced(monkeypatch, choose)
    forced_openings(monkeypatch, choose is up)
    for seed, kind in enumerate(KINDS):
        z = words_of(logits(seed, 30, classes, kind), 46)

        async def program(party, x):
            return await refmpc.probabilities(x, 2 * BOUND)

        p = opened(program, Secret(z, 46), seed=seed).value
        assert np.abs(p - softmax(z * 2.0**-46)).max() < 2.0**-15


@pytest.mark.parametrize("classes,columns", [(2, 1), (5, None), (13, 4)])
def test_probabilities_of_some_classes_times_a_weight_of_the_row(classes, columns):
    z = words_of(logits(1, 40, classes, KINDS[0], 60.0), 30)
    weights = np.random.default_rng(2).integers(0, 64 << 8, 40)

    async def program(party, x, w):
        return await refmpc.probabilities(x, 120.0, columns, w)

    found = opened(program, Secret(z, 30), Secret(weights, 8))
    assert found.scale == 48
    want = weights[:, np.newaxis] * 2.0**-8 * softmax(z * 2.0**-30)[:, :columns]
    assert np.abs(found.value - want).max() < 64 * 2.0**-15


def test_widths_leave_room_for_the_spread():
    for spread in (0.0, 1.0, 62.0, 1000.0, 62934.6, 2.0**36 - 34):
        assert 2 ** (high_bits(spread) + 4) >= spread + 34
        assert 2 ** order_width(spread) >= 4 * spread + 2 and order_width(spread) >= high_bits(spread) + 5
    with pytest.raises(ValueError, match="spread"):
        high_bits(2.0**36)


# dealers, resharing, refusals ----------------------------------------------------------------------


@pytest.mark.parametrize("rows", [0, 1, 23, 24, 25, 26, 100])
def test_rows_are_dealt_in_thirds_and_keep_their_dealers(rows):
    x = np.arange(rows * 2).reshape(rows, 2)

    async def program(party, x):
        pair = at_holders(x, row_segments(party, rows))
        return [await refmpc.replicate(pair), await refmpc.truncate_additive(pair, 1), pair]

    whole, cut, pair = opened(program, Secret(x))
    assert np.array_equal(whole.signed, x) and np.array_equal(pair.words, x.view(np.uint64))
    assert ((cut.signed == x >> 1) | (cut.signed == (x + 1) >> 1)).all()
    assert sum(row_sizes(rows)) == rows and len(row_sizes(rows)) == (3 if rows >= 24 else 1)


def test_the_three_links_carry_like_loads():
    z = words_of(logits(0, 300, 10, "normal"), 46)

    async def program(party, x):
        await refmpc.probabilities(as_summands(party, x), 2 * BOUND)

    sent = [ledger.phases["main"].bytes_sent for ledger in evaluate(program, Secret(z, 46)).run.ledgers]
    assert max(sent) < 1.01 * min(sent)


@pytest.mark.parametrize(
    "name, call, value, bits",
    [
        ("octave", lambda s: refmpc.octave(s, 4), 4.5, 57),
        ("octave", lambda s: refmpc.octave(s, 4), 0.5, 57),
        ("spline_times", lambda m: refmpc.spline_times(m, m, "root"), 2.3, 50),
        ("clip_root", lambda q: refmpc.clip_root(q, 100.0), 101.0, 42),
        ("truncate_additive", lambda z: refmpc.truncate_additive(z, 3), -1.01, 62),
    ],
)
def test_debug_mode_names_what_leaves_its_domain(name, call, value, bits):
    def program(party, x):
        return call(at_holders(x, row_segments(party, 3)))

    with pytest.raises(Exception, match=f"'{name}' left its domain") as caught:
        opened(program, Secret(words_of([value] * 3, bits), bits), insecure_check_ranges=True)
    assert isinstance(caught.value.__cause__, RangeError)


def test_values_of_other_dealers_and_summands_of_the_dealer_are_refused():
    def program(party, x):
        pair, other = (at_holders(x, row_segments(party, 3)) for _ in range(2))
        whole = as_summands(party, x)
        messages = []
        for call in (
            lambda: refmpc.spline_times(pair, other, "root"),
            lambda: refmpc.replicate(whole),
            lambda: refmpc.octave(whole, 4),
            lambda: refmpc.scale_rows(whole, x.reshape(3, 1), 3),
        ):
            with pytest.raises(ValueError) as caught:
                party.complete(call())
            messages.append(str(caught.value))
        with pytest.raises(TypeError, match="no truth value"):
            bool(pair)
        return messages

    dealers, *rest = opened(program, Secret([1, 2, 3], 20))
    assert "dealers" in dealers[0] and all("summand of the dealer" in message[0] for message in rest)
