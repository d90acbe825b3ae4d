"""The kernels of the low-round protocols: numpy and numba give the same words, whatever lies in the memory they
fill."""

import numpy as np
import pytest

from accel import backend
from refmpc.mathematics.series import turns

N, G = 37, 5
PAIRS = G * (G - 1) // 2


def case(name, seed):
    """Arguments of a kernel, outputs last: ("out", shape, dtype)."""
    rng = np.random.default_rng(seed)

    def words(*shape):
        return rng.integers(0, 2**64, shape, dtype=np.uint64)

    def small(bound, *shape):
        return rng.integers(0, bound, shape, dtype=np.uint8)

    def out(*shape, dtype=np.uint64):
        return ("out", shape, dtype)

    width, prime = (18, 11) if seed % 2 else (7, 7)
    digits = -(-width // 2)
    sizes = np.array([(6, 6), (2, 3), (8, 7), (5, 6, 6)][seed % 4])
    hot = sum(max(1, (1 << int(size)) // 64) for size in sizes)
    values = 2 ** (len(sizes) + 1) - 1
    slots = rng.permuted(np.tile(np.arange(G, dtype=np.uint8), (N, 1)), axis=1)
    dealt, tests = (3 * digits + 1, N * PAIRS), (2 * digits + 1, N * PAIRS)
    table, fine = rng.random(4096), rng.random(256)
    bits, top = (1, 25, 40, 61)[seed % 4], seed % 4
    places = 8 << (top + 1)
    hot_of_octave, leads = max(1, places // 64), bool(seed % 2)
    scale, second = (5, 42, 57, 62)[seed % 4], 1 + seed % 2
    terms, ring, each = 3 + seed % 4, (64, 40, 23)[seed % 3], 2 * (3 + seed % 4) + 1
    p, q = rng.integers(-(2**31), 2**31, (2, terms))
    kept, tables, angle, held = 2 + seed, turns(), (20 - seed, bool(seed % 2)), (p, q, 60 - 10 - seed, 2**64 - 1 - seed)
    return {
        "add_low": (words(N), words(N), 19, out(N)),
        "subtract_low": (words(N), words(N), 64, out(N)),
        "open_dealer": (words(N), words(N), words(N), 19, out(N)),
        "replicated_rho": (words(N), words(N), out(N)),
        "subtract_scaled": (words(N), words(N), 40, out(N)),
        "weigh_opened_deal": (small(2, 3, N), words(N), words(N, 2, 3), out(N, 2, 3)),
        "weigh_opened_hold": (
            *(small(2, 3, N), words(N, 2, 3), words(N), words(N), words(2, 4), np.array([True, False]), leads),
            out(2, N),
        ),
        "scale_rows_deal": (words(N), words(N, G), bits, words(N, 2, 1 + G), out(N, 2, 1 + G)),
        "scale_rows_hold": (words(N), words(N, G), words(N, G), words(N, 2, 1 + G), bits, 1, leads, out(N, G)),
        "squared_deal": (words(N, G), words(N), bits, words(N, 1 + 4 * G), out(N, 1 + 4 * G), out(N)),
        "squared_hold": (
            *(words(N, G), words(N, G), words(N, G), words(N), words(N), words(N, 1 + 4 * G), bits, leads),
            out(N),
        ),
        "order_shuffle": (np.stack([small(i + 1, N) for i in range(1, G)]), out(N, G, dtype=np.uint8)),
        "order_deal": (words(N, G), small(prime, *dealt), width, prime, out(*dealt, dtype=np.uint8)),
        "order_reply": (
            *(words(N, G), small(prime, *dealt), slots, small(prime - 1, *tests), small(prime, *tests)),
            *(small(2 * digits + 1, N * PAIRS), width, prime, leads, out(*tests, dtype=np.uint8)),
        ),
        "order_place": (words(N, G), slots, words(N, G), words(N, G), width, out(N, G)),
        "order_decide": (
            *(small(prime, *tests), small(prime, *tests), prime, words(N, G), words(N, G), width),
            *(out(N, G), out(N)),
        ),
        "order_pick": (words(N, G), words(N, G), width, out(N)),
        "split_codes": (words(N), out(4, N, dtype=np.uint8)),
        "exp_below_argument": (words(N, G), words(N), seed % 3, 30, 14, 1 << 14, 32, out(N, G)),
        "exp_below_deal": (
            words(N),
            sizes,
            words(N),
            table,
            fine,
            words(N, hot),
            words(N, values),
            out(N, hot),
            out(N, values),
        ),
        "exp_below_bits": (words(N), sizes, words(N, hot), words(N), out(N, dtype=np.uint8)),
        "exp_below_take": (
            *(words(N), small(4 ** len(sizes), N), small(4 ** len(sizes), N), len(sizes), words(N, values)),
            *(rng.random((2, 4096)), fine, out(N)),
        ),
        "octave_deal": (words(N), 54, places, words(N, hot_of_octave), out(N, hot_of_octave)),
        "octave_bits": (words(N), words(N, hot_of_octave), words(N), 54, places, top, out(N, dtype=np.uint8)),
        "spline_deal": (words(N), words(N), scale, words(N, second, 40), out(N, second, 40)),
        "spline_hold": (words(N), words(N), words(N, second, 40), scale, seed // 2 % 2, out(N)),
        "cut_low": (words(N), 2**63 + 5, ring, 3, 17, out(N)),
        "series_deal": (words(N), *angle, terms, 16, ring, tables, words(N, 2 * terms), out(N, 2 * terms)),
        "series_hold": (words(N), *angle, *held, ring, tables, words(N, 2 * terms), leads, out(N)),
        "scaled_deal": (
            *(words(N), *angle, terms, 10, words(N, G), seed, ring, tables),
            *(
                (words(N, 2 * terms + G * each), out(N, 2 * terms + G * each))
                if leads
                else (words(N, G * each), out(N, G * each))
            ),
        ),
        "scaled_hold": (
            *(words(N), *angle, *held, words(N, G) >> np.uint64(64 - kept), kept, 5, ring, tables),
            *(words(N, 2 * terms + G * each), words(N, G * each), leads, out(N, G)),
        ),
        "lifted_product_deal": (words(N), 9, words(N, G), 13, ring, words(N, 6 * G + 2), out(N, 6 * G + 2)),
        "lifted_product_hold": (
            *(words(N) >> np.uint64(55), 9, 77, words(N, G) >> np.uint64(51), 13, 4001, ring, words(N, 6 * G + 2)),
            *(leads, out(N, G)),
        ),
        "lifted_squares_deal": (words(N, G), 9, ring, words(N, 3 * G + 1), out(N, 3 * G + 1)),
        "lifted_squares_hold": (words(N, G) >> np.uint64(55), 9, 77, ring, words(N, 3 * G + 1), leads, out(N)),
    }[name]


NAMES = [
    *("add_low", "subtract_low", "open_dealer", "replicated_rho", "subtract_scaled"),
    *("weigh_opened_deal", "weigh_opened_hold", "scale_rows_deal", "scale_rows_hold", "squared_deal", "squared_hold"),
    *("order_shuffle", "order_deal", "order_reply", "order_place", "order_decide", "order_pick"),
    *("split_codes", "exp_below_argument", "exp_below_deal", "exp_below_bits", "exp_below_take"),
    *("octave_deal", "octave_bits", "spline_deal", "spline_hold"),
    *(
        "cut_low",
        "series_deal",
        "series_hold",
        "scaled_deal",
        "scaled_hold",
        "lifted_product_deal",
        "lifted_product_hold",
        "lifted_squares_deal",
        "lifted_squares_hold",
    ),
]


def test_every_kernel_of_the_families_is_compared():
    from accel.reference import additive, order, pieces, series

    assert set(NAMES) == {*additive.__all__, *order.__all__, *pieces.__all__, *series.__all__}


@pytest.mark.parametrize("name", NAMES)
def test_numpy_and_numba_give_the_same_words(name):
    for seed in range(12):
        results = []
        for filling, kernels in ((0, backend("numpy")), (255, backend("numba"))):
            arguments, outputs = [], []
            for value in case(name, seed):
                if isinstance(value, tuple):
                    value = (
                        np.full(int(np.prod(value[1])) * np.dtype(value[2]).itemsize, filling, np.uint8)
                        .view(value[2])
                        .reshape(value[1])
                    )
                    outputs.append(value)
                arguments.append(value)
            with np.errstate(over="ignore"):
                assert getattr(kernels, name)(*arguments) is None
            results.append(outputs)
        for one, other in zip(*results, strict=True):
            assert np.array_equal(one, other), (name, seed)


@pytest.mark.parametrize("name", ["numpy", "numba"])
def test_every_test_that_the_dealer_of_order_gets_lies_under_a_mask_of_its_own(name):
    """Another mask is another message at one place, by as much, and every place has one: a one-time pad."""
    kernel = backend(name).order_reply
    for seed in range(4):
        *given, out = case("order_reply", seed)
        place, prime, leads = 4, given[7], given[8]
        messages, masks = [], []
        for turn in range(3):
            masks.append(np.random.default_rng([seed, turn]).integers(0, prime, given[place].shape, dtype=np.uint8))
            given[place] = masks[-1]
            messages.append(np.full(out[1], 255, dtype=out[2]))
            with np.errstate(over="ignore"):
                kernel(*given, messages[-1])
        assert max(message.max() for message in messages) < prime
        moved, added = ([(each[turn].astype(int) - each[0]) % prime for turn in (1, 2)] for each in (messages, masks))
        sign = 1 if leads else -1
        # by pairs: columns go to the places of their slots, lines turn by the draw of the pair
        columns = moved[0].shape[1]
        places: dict[tuple[int, ...], list[int]] = {}
        for column in range(columns):
            key = tuple(np.roll(sign * np.stack(added)[:, :, column] % prime, given[5][column], axis=1).reshape(-1))
            places.setdefault(key, []).append(column)
        assert len(places) == columns  # masks of three columns of this length are never the same
        reached = [places[tuple(np.stack(moved)[:, :, column].reshape(-1))] for column in range(columns)]
        assert sorted(column for (column,) in reached) == list(range(columns))


def test_two_kernels_of_one_name_are_refused(monkeypatch):
    import accel
    from accel.reference import order

    monkeypatch.setattr(order, "__all__", [*order.__all__, "add_low"])
    monkeypatch.setattr(order, "add_low", None, raising=False)
    with pytest.raises(ValueError, match="two kernels .* are called 'add_low'"):
        accel._collected.__wrapped__("accel.reference")
