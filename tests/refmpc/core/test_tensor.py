"""Secret tensors: operators, indexing, joining, broadcasting, views, scales, and what they refuse."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import refmpc
from tests.refmpc.harness import Secret, evaluate, layouts, opened, random_signed, seeds, shapes, words

broadcasts = st.sampled_from(
    [
        ((3,), (3,)),
        ((3,), ()),
        ((), (3,)),
        ((2, 3), (3,)),
        ((3,), (2, 3)),
        ((2, 1), (1, 2)),
        ((2,), (2, 2)),
        ((0,), (1,)),
    ]
)


@given(pair=broadcasts, seed=seeds, layout=layouts, left=st.integers(0, 9), right=st.integers(0, 9))
def test_sums_and_differences_align_scales_and_broadcast(pair, seed, layout, left, right):
    a, b = random_signed(seed, pair[0], bits=50), random_signed(seed + 1, pair[1], bits=50)
    got = opened(
        lambda party, x, y: [x + y, x - y, -x, y - x],
        Secret(a, left, layout=layout),
        Secret(b, right, layout=layout),
        seed=seed,
    )
    scale = max(left, right)
    wide_a, wide_b = a << (scale - left), b << (scale - right)
    want = [wide_a + wide_b, wide_a - wide_b, -a, wide_b - wide_a]
    for result, expected, bits in zip(got, want, [scale, scale, left, scale], strict=True):
        assert result.words.shape == expected.shape
        assert np.array_equal(result.signed, expected) and result.scale == bits


@given(pair=broadcasts, seed=seeds, bits=st.integers(0, 20))
def test_public_operands_stand_on_either_side(pair, seed, bits):
    a = random_signed(seed, pair[0], bits=30)
    public = np.random.default_rng(seed).integers(-100, 100, pair[1])
    got = opened(
        lambda party, x: [x + public, public + x, x - public, public - x, x * public, public * x], Secret(a, bits)
    )
    shifted = public << bits
    want = [a + shifted, a + shifted, a - shifted, shifted - a, a * public, a * public]
    for result, expected in zip(got, want, strict=True):
        assert np.array_equal(result.signed, expected) and result.scale == bits


@given(seed=seeds, size=st.integers(0, 20), left=st.integers(1, 16), right=st.integers(1, 16))
def test_the_star_truncates_back_to_the_larger_scale(seed, size, left, right):
    a, b = random_signed(seed, (size,), bits=24), random_signed(seed + 1, (size,), bits=24)
    got = opened(lambda party, x, y: x * y, Secret(a, left), Secret(b, right), seed=seed)
    error = got.signed - ((a * b) >> min(left, right))
    assert got.scale == max(left, right)
    assert error.min(initial=0) >= 0 and error.max(initial=0) <= 1


def test_integers_multiply_without_truncation():
    run = evaluate(lambda party, x, y: x * y, Secret([3, -4], 0), Secret([5, 6], 8))
    assert run.opened.signed.tolist() == [15, -24] and run.opened.scale == 8
    assert run.run.rounds == 1


@given(seed=seeds, factor=st.floats(-4, 4), bits=st.integers(4, 20))
def test_times_a_public_real_is_off_by_one_unit_and_the_rounding_of_the_factor(seed, factor, bits):
    a = random_signed(seed, (30,), bits=24)
    got = opened(lambda party, x: [x * factor, factor * x], Secret(a, bits), seed=seed)
    for result in got:
        assert result.scale == bits
        allowed = 1 + np.abs(a) * 2.0 ** -(bits + 1) + 1e-6
        assert (np.abs(result.signed - a * factor) <= allowed).all()


@pytest.mark.parametrize(
    "a, b", [((2, 3), (3, 4)), ((3,), (3,)), ((2, 3), (3,)), ((3,), (3, 2)), ((2, 2, 3), (3, 2)), ((3,), (2, 3, 2))]
)
def test_matmul_with_public_matrices_on_either_side(a, b):
    x, y = random_signed(1, a, bits=20), np.random.default_rng(2).integers(-9, 9, b)
    got = opened(lambda party, s: [s @ y, s @ (y / 4)], Secret(x, 6))
    assert np.array_equal(got[0].signed, x @ y) and got[0].scale == 6
    assert np.abs(got[1].value - (x / 64) @ (y / 4)).max() <= 2**-6 and got[1].scale == 6
    other = np.swapaxes(x, -1, -2) if x.ndim > 1 else x
    wide = np.swapaxes(y, -1, -2) if y.ndim > 1 else y
    got = opened(lambda party, s: wide @ s, Secret(other, 6))
    assert np.array_equal(got.signed, wide @ other)


def test_matmul_operator_truncates_to_the_larger_scale():
    a, b = random_signed(1, (4, 5), bits=20), random_signed(2, (5, 3), bits=20)
    got = opened(lambda party, x, y: x @ y, Secret(a, 8), Secret(b, 12))
    assert got.scale == 12 and set((got.signed - ((a @ b) >> 8)).reshape(-1)) <= {0, 1}
    got = opened(lambda party, x, y: x @ y, Secret(a, 0), Secret(b, 12))
    assert got.scale == 12 and np.array_equal(got.signed, a @ b)


INDICES = [
    0,
    -1,
    slice(1, None),
    slice(None, None, -2),
    (0, 1),
    (slice(None), 1),
    (Ellipsis, 0),
    (None, 1),
    (slice(None), None, 0),
    [1, 0, 1],
    ([0, 1], [1, 1]),
    (0, slice(None), [1, 0]),
    ([0, 1], slice(None), [1, 0]),
    np.array([True, False]),
    np.int64(1),
]


@pytest.mark.parametrize("index", INDICES, ids=str)
@pytest.mark.parametrize("width", [None, 64], ids=["arithmetic", "boolean"])
def test_indexing_is_numpys(index, width):
    values = np.arange(8).reshape(2, 2, 2)
    got = opened(lambda party, x: x[index], Secret(values, 5, width=width))
    assert np.array_equal(got.signed, values[index])
    assert got.scale == (width or 5)


def test_slices_are_views_and_copies_are_not():
    def program(party, x):
        views = [x[1:], x.T, x.reshape(6), x.broadcast_to((4, 2, 3)), x[:, ::2]]
        return [[np.shares_memory(x.shares, v.shares) for v in views], np.shares_memory(x.shares, x.copy().shares)]

    views, copied = opened(program, Secret(np.zeros((2, 3), np.int64)))
    assert all(all(flags) for flags in views) and not any(copied)


@given(shape=shapes, seed=seeds, layout=layouts, data=st.data())
def test_transpose_sum_and_reshape_follow_numpy(shape, seed, layout, data):
    values = random_signed(seed, shape)
    order = data.draw(st.permutations(range(len(shape))))
    signs = [a - len(shape) if data.draw(st.booleans()) else a for a in order]
    axis = data.draw(
        st.one_of(st.none(), st.just(tuple(signs)), *([st.integers(-len(shape), len(shape) - 1)] if shape else []))
    )
    got = opened(
        lambda party, x: [x.T, x.transpose(*signs), x.sum(axis), x.sum(axis, keepdims=True), x.reshape(-1), x.copy()],
        Secret(values, 3, layout=layout),
        seed=seed,
    )
    ring = words(values)
    want = [
        ring.T,
        ring.transpose(signs) if signs else ring,
        ring.sum(axis=axis, dtype=np.uint64),
        ring.sum(axis=axis, dtype=np.uint64, keepdims=True),
        ring.reshape(-1),
        ring,
    ]
    for result, expected in zip(got, want, strict=True):
        assert result.words.shape == np.shape(expected) and np.array_equal(result.words, expected)
        assert result.scale == 3


@given(seed=seeds, axis=st.integers(-2, 1), width=st.sampled_from([None, 5]))
def test_concatenate_and_stack_join_along_any_axis(seed, axis, width):
    a, b = (np.random.default_rng(seed + i).integers(0, 32, (2, 3)) for i in range(2))
    got = opened(
        lambda party, x, y: [refmpc.concatenate([x, y, x], axis), refmpc.stack([x, y], axis), refmpc.stack([x], -3)],
        Secret(a, 7, width=width, layout="transposed"),
        Secret(b, 7, width=width),
    )
    want = [np.concatenate([a, b, a], axis), np.stack([a, b], axis), np.stack([a], -3)]
    for result, expected in zip(got, want, strict=True):
        assert np.array_equal(result.signed, expected) and result.scale == (width or 7)


def test_rescaling_is_exact_and_reinterpreting_is_free():
    fine, read = opened(lambda party, x: [x.rescale(20), x.reinterpret(4)], Secret([3, -5], 2))
    assert fine.scale == 20 and fine.value.tolist() == [0.75, -1.25]
    assert read.scale == 4 and read.value.tolist() == [3 / 16, -5 / 16]


def test_tensors_show_shape_and_scale_but_never_a_share():
    def program(party, x, b):
        for tensor in (x, b, x[0], x * x):
            shown = repr(tensor) + str(tensor) + f"{tensor}"
            for word in np.unique(refmpc.unseal(tensor.shares)):
                assert str(word) not in shown and f"{int(word):x}" not in shown
        return [repr(x), repr(b)]

    shown = opened(program, Secret(random_signed(1, (2, 3)), 16), Secret(random_signed(2, (4,)), width=64))
    assert shown[0][1] == "ArithmeticTensor(shape=(2, 3), fraction_bits=16, party=1)"
    assert shown[1][2] == "BooleanTensor(shape=(4,), width=64, party=2)"


def test_numpy_arrays_on_the_left_leave_the_work_to_the_tensor():
    ones = np.ones(2, dtype=np.int64)
    got = opened(lambda party, x: [ones + x, ones - x, ones * x, ones < x, np.int64(1) - x], Secret([5, 0]))
    assert [r.words.view(r.words.dtype).astype(np.int64).tolist() for r in got] == [
        [6, 1],
        [-4, 1],
        [5, 0],
        [1, 0],
        [-4, 1],
    ]


def test_tensors_have_a_length_and_can_be_walked_through():
    got = opened(
        lambda party, x: [list(x)[1], [np.int64(len(x)), np.int64(x.ndim), np.int64(x.size)]], Secret([[1, 2], [3, 4]])
    )
    assert got[0].signed.tolist() == [3, 4]
    assert [values[0] for values in got[1]] == [2, 2, 4]


REFUSED = {
    "coarser scale": (lambda x, b: x.rescale(3), r"fraction_bits = 3: must be an integer from 8 to 62; truncate"),
    "absurd scale": (lambda x, b: x.reinterpret(63), r"fraction_bits = 63"),
    "sum along a missing axis": (lambda x, b: x.sum(axis=2), r"axis = 2: must be an integer from -2 to 1"),
    "transpose a missing axis": (lambda x, b: x.transpose(2, 3), r"axis = 2"),
    "concatenate along a missing axis": (lambda x, b: refmpc.concatenate([x, x], axis=2), r"axis = 2"),
    "stack along a missing axis": (lambda x, b: refmpc.stack([x, x], axis=3), r"axis = 3"),
    "mixed scales": (lambda x, b: refmpc.concatenate([x, x.rescale(9)]), r"one kind and scale; rescale them first"),
    "mixed kinds": (lambda x, b: refmpc.stack([x, b]), r"must all be of one kind"),
    "nothing to join": (lambda x, b: refmpc.concatenate([]), r"at least one tensor"),
    "length of a single element": (lambda x, b: len(x.sum()), r"at least one axis"),
    "truth of a secret": (lambda x, b: bool(x), r"is secret: it has no truth value"),
    "public value out of range": (lambda x, b: x + 2.0**54, r"public operand = .*below 1\.80144e\+16"),
    "public infinity": (lambda x, b: x * np.inf, r"public operand = inf"),
    "shapes that do not broadcast": (lambda x, b: x + np.zeros(4), r"broadcast"),
    "reals as integers": (lambda x, b: x.scale_by_integers(0.5), r"factor = 0\.5: must be integers; multiply by real"),
    "bit out of range": (lambda x, b: b.bit(8), r"index = 8: must be an integer from 0 to 7"),
    "index out of range": (lambda x, b: x[5], r"index 5 is out of bounds"),
    "words as text": (lambda x, b: x + "1", r"public operand = dtype"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_makes_no_sense_is_refused(case):
    program, said = REFUSED[case]
    with pytest.raises(refmpc.PartyFailed, match=said):
        opened(lambda party, x, b: program(x, b), Secret(np.zeros((2, 3), np.int64), 8), Secret([1, 2], width=8))
