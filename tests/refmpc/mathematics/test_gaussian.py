"""Gaussian noise in 3PC: the law of the samples, their exactness bit by bit, cost, and what a server can know."""

import math
import warnings

import numpy as np
import pytest
from numpy.polynomial import chebyshev, polynomial
from scipy import stats
from scipy.special import ndtri

import refmpc
from refmpc.core.party import Operation, Party
from refmpc.mathematics import gaussian
from refmpc.mathematics.gaussian_table import CENTRE_BITS, COEFFICIENT_BITS, TABLE
from tests.gaussians import departures

UNIT = 2.0**-gaussian.JOINT_FRACTION_BITS
OUTSIDE_STD = math.sqrt(1 + gaussian.SMOOTHING**2)
CHUNK = 1 << 16


def run(program, inputs=None, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return refmpc.run(program, inputs, **options)


def open_tensors(tensors):
    """The secret from the three parties' shares, which must agree where two hold the same one."""
    shares = [refmpc.unseal(tensor.shares) for tensor in tensors]
    for i in range(3):
        np.testing.assert_array_equal(shares[i][1], shares[(i + 1) % 3][0])
    return refmpc.decode(shares[0][0] + shares[1][0] + shares[2][0], tensors[0].fraction_bits)


def known_words(party, number, count):
    """The words of one operation's streams, drawn a second time: what this party knows of the secret bits."""
    return gaussian._random_words(Operation(party, "again", number), count)


def sample_with_knowledge(party, chunks, count, smoothing):
    """Joint samples, with this party's part of all the random bits and its own smoothing noise."""
    results = []
    for _ in range(chunks):
        number = party._operations + 1
        tensor = party.complete(refmpc.joint_gaussian(party, (count,), smoothing))
        known = np.stack([known_words(party, number, count), known_words(party, number + 1, count)])
        own = np.zeros(count)
        if smoothing:
            scale = CENTRE_BITS + gaussian.FACTOR_BITS
            stream = party.private_stream("joint gaussian smoothing", number)
            words = gaussian._own_samples(stream, (count,), gaussian._split(smoothing)[1] * 2.0**scale)
            own = words.view(np.int64) * 2.0**-scale
        results.append((tensor, known, own))
    return results


class Drawn:
    """Samples of one seeded run (262,144 by default) as an outsider sees them, and each server's knowledge of them."""

    def __init__(self, smoothing, seed, chunks=4):
        outputs = run(lambda party: sample_with_knowledge(party, chunks, CHUNK, smoothing), insecure_seed=seed).outputs
        parties = range(3)
        self.z = np.concatenate([open_tensors([outputs[i][c][0] for i in parties]) for c in range(chunks)])
        self.known = [np.concatenate([outputs[i][c][1] for c in range(chunks)], axis=-1) for i in parties]
        self.own = [np.concatenate([outputs[i][c][2] for c in range(chunks)]) for i in parties]
        self.shares = [
            np.concatenate([refmpc.unseal(outputs[i][c][0].shares) for c in range(chunks)], axis=-1) for i in parties
        ]

    @property
    def secret_words(self):
        """The secret words themselves: segment bits and position bits."""
        return self.known[0][:, 0] ^ self.known[1][:, 0] ^ self.known[2][:, 0]


@pytest.fixture(scope="module")
def smoothed():
    return Drawn(gaussian.SMOOTHING, seed=11)


@pytest.fixture(scope="module")
def plain():
    return Drawn(0.0, seed=12, chunks=2)


def exact_magnitudes(segment_words, position_words):
    """|Z| at the middle of the interval of tail probabilities that belongs to these secret bits."""
    ones = np.zeros(segment_words.size, dtype=np.int64)
    still = np.ones(segment_words.size, dtype=bool)
    for k in range(gaussian.SEGMENT_BITS):
        still &= (segment_words >> np.uint64(k)) & np.uint64(1) == 1
        ones += still
    bits = gaussian.POSITION_BITS
    place = (position_words & np.uint64(2**bits - 1)).astype(np.float64)
    return ones, -ndtri(2.0 ** -(ones + 1.0) * (1 - (place + 0.5) * 2.0 ** -(bits + 1)))


# the law ----------------------------------------------------------------------------------------


def test_joint_samples_follow_the_gaussian(smoothed, plain):
    assert departures(smoothed.z, OUTSIDE_STD) == []
    assert departures(plain.z, 1.0) == []


def test_given_its_own_part_every_server_faces_variance_one(smoothed):
    for own in smoothed.own:
        assert departures(own, gaussian.SMOOTHING) == []
        assert departures(smoothed.z - own, 1.0) == []


def test_a_planted_bias_is_caught(smoothed):
    assert "moment 2" in departures(1.01 * smoothed.z, OUTSIDE_STD)
    assert "Kolmogorov-Smirnov" in departures(smoothed.z + 0.1, OUTSIDE_STD)
    assert "moment 1" in departures(smoothed.z + 0.1, OUTSIDE_STD)
    assert departures(np.minimum(smoothed.z, 3.5), OUTSIDE_STD) == ["above 3.5"]  # a tail cut off: nothing else sees it


def test_a_bias_planted_in_the_protocol_is_caught(monkeypatch):
    monkeypatch.setattr(gaussian, "TABLE", tuple(tuple(round(1.01 * word) for word in row) for row in TABLE))
    assert "moment 2" in departures(Drawn(0.0, seed=12).z, 1.0)


@pytest.mark.heavy
@pytest.mark.timeout(3600)
def test_ten_million_joint_samples():
    pieces = [Drawn(gaussian.SMOOTHING, seed=100 + i, chunks=16).z for i in range(10)]
    z = np.concatenate(pieces)
    assert z.size > 10_000_000
    assert np.sum(np.abs(z) > 5 * OUTSIDE_STD) > 0
    assert departures(z, OUTSIDE_STD) == []
    assert "above 4.5" in departures(np.minimum(z, 4.5), OUTSIDE_STD)
    assert departures(1.002 * z, OUTSIDE_STD) != []


def test_neighbouring_samples_are_independent(smoothed):
    x = smoothed.z / OUTSIDE_STD
    for power in (1, 2):
        values = x**power - np.mean(x**power)
        for lag in (1, 2, 3, CHUNK):
            score = np.sum(values[lag:] * values[:-lag]) / np.var(values) / math.sqrt(x.size - lag)
            assert abs(score) < 5


# exactness --------------------------------------------------------------------------------------


def test_every_sample_is_the_gaussian_of_its_bits(plain):
    """Not a statistic: each opened sample against Q^-1 of the secret bits, redrawn from the seeded streams."""
    segments, positions = plain.secret_words
    ones, exact = exact_magnitudes(segments, positions)
    sign = 1.0 - 2.0 * ((positions >> np.uint64(gaussian.POSITION_BITS)) & np.uint64(1))
    assert ones.max() >= 14
    assert np.abs(plain.z - sign * exact).max() <= gaussian.MAGNITUDE_ERROR + UNIT


def test_smoothing_adds_each_servers_own_noise(smoothed):
    segments, positions = smoothed.secret_words
    sign = 1.0 - 2.0 * ((positions >> np.uint64(gaussian.POSITION_BITS)) & np.uint64(1))
    factor = gaussian._split(gaussian.SMOOTHING)[0] * 2.0**-gaussian.FACTOR_BITS
    expected = factor * sign * exact_magnitudes(segments, positions)[1] + sum(smoothed.own)
    assert np.abs(smoothed.z - expected).max() <= gaussian.MAGNITUDE_ERROR + UNIT


def plant(monkeypatch, segment_words, position_words):
    """Replace the secret random words by public ones (they alternate: segments, then positions)."""
    honest_operation = Party.operation

    def planted(operation, count):
        words = segment_words if operation.name.endswith("segments") else position_words
        shares = np.zeros((2, count), dtype=np.uint64)
        if operation.party.id in (0, 2):
            shares[0 if operation.party.id == 0 else 1] = words
        return shares

    def named(party, name, *public):
        operation = honest_operation(party, name, *public)
        if name == "joint_gaussian":
            first = party.__dict__.setdefault("_planted", 0) % 2 == 0
            party._planted += 1
            operation.name = "segments" if first else "positions"
        return operation

    monkeypatch.setattr(gaussian, "_random_words", planted)
    monkeypatch.setattr(Party, "operation", named)


def test_all_segments_to_their_edges(monkeypatch):
    """All 61 segments, the first and last position and random ones, both signs: segments random bits never reach."""
    generator = np.random.default_rng(5)
    last = 2**gaussian.POSITION_BITS - 1
    positions = np.concatenate([[0, 1, last // 2, last - 1, last], generator.integers(0, last, 120)]).astype(np.uint64)
    positions |= generator.integers(0, 2, positions.size).astype(np.uint64) << np.uint64(gaussian.POSITION_BITS)
    above = generator.integers(0, 2**64, gaussian.SEGMENT_BITS + 1, dtype=np.uint64)  # bits above the first zero
    patterns = [
        (2**k - 1) | (int(high) >> (k + 1) << (k + 1) if k < gaussian.SEGMENT_BITS else 0)
        for k, high in enumerate(above)
    ]
    segments = np.repeat(np.array(patterns, dtype=np.uint64), positions.size)
    positions = np.tile(positions, len(patterns))
    plant(monkeypatch, segments, positions)
    tensors = run(lambda party: party.complete(refmpc.joint_gaussian(party, segments.shape, 0.0))).outputs
    ones, exact = exact_magnitudes(segments, positions)
    assert set(ones) == set(range(gaussian.SEGMENT_BITS + 1))
    sign = 1.0 - 2.0 * (positions >> np.uint64(gaussian.POSITION_BITS))
    assert np.abs(open_tensors(tensors) - sign * exact).max() <= gaussian.MAGNITUDE_ERROR + UNIT


def segment_polynomial(segment):
    words = np.array(TABLE[segment], dtype=np.float64)
    return words * 2.0 ** -np.array([CENTRE_BITS] + [COEFFICIENT_BITS] * gaussian.DEGREE, dtype=np.float64)


def test_magnitude_error_covers_the_worst_case_of_every_segment():
    """The sum in the comment at MAGNITUDE_ERROR, for all roundings, on each segment, and the range of the product."""
    count, half_step = 2000, 2.0**-gaussian.POSITION_BITS
    t = np.concatenate([[-1.0, 1.0], np.cos(np.pi * (np.arange(count) + 0.5) / count)])
    largest = 0.0
    for segment in range(len(TABLE)):
        coefficients = segment_polynomial(segment)
        exact = -ndtri(2.0 ** -(segment + 1) * (3 - t) / 4)
        values = polynomial.polyval(t, coefficients)
        series = chebyshev.chebfit(t[2::20], exact[2::20], 40)
        assert np.all(np.abs(series[1:18]) * 5.82 ** np.arange(1, 18) < 2)  # the rate that bounds what t misses
        approximation = 1.002 * np.abs(values - exact).max()
        steepest = 2.0 ** -(segment + 3) / stats.norm.pdf(exact[1])
        # T^i is off by at most i − 1 units: products of factors below one add their errors and one unit
        powers = np.sum(np.abs(coefficients[2:]) * np.arange(1, gaussian.DEGREE)) * half_step
        largest = max(largest, approximation + steepest * half_step + powers + 2.0**-CENTRE_BITS)
        assert np.abs(values - coefficients[0]).max() < 0.45  # the inner product at 63 bits stays below 2^62
        assert polynomial.polyval(t, polynomial.polyder(coefficients)).min() > 0
    assert 0.9 * gaussian.MAGNITUDE_ERROR < largest <= gaussian.MAGNITUDE_ERROR


@pytest.mark.parametrize("z", [0.0, 0.5, -1.0, 2.5, -6.0, 12.0])
@pytest.mark.parametrize("smoothing", [gaussian.SMOOTHING, 0.01, 0.25])
def test_slope_bound_holds_for_the_worst_errors(monkeypatch, z, smoothing):
    """The density of X + δ(X) + smoothing by quadrature: its slope keeps the bound, and errors chosen to hurt reach it.

    The worst δ is the sign of W² − W·E W − 1 (both signs are tried); others must not do worse than the bound either.
    """
    error = 1e-5 * smoothing
    monkeypatch.setattr(gaussian, "MAGNITUDE_ERROR", error)
    eta = math.sqrt(2) * smoothing
    kept = 1 - eta**2
    x = kept * z + eta * np.linspace(-12, 12, 200_001)
    w = (z - x) / eta
    patterns = [np.sign(w**2 - w * eta * z - 1), np.sign(x - kept * z), np.sin(7 * w), -np.sign(x)]

    def slope(delta):
        exponent = -(x**2) / (2 * kept) - ((z - x - delta) / eta) ** 2 / 2
        weight = np.exp(exponent - exponent.max())
        return -np.sum(weight * (z - x - delta)) / np.sum(weight) / eta**2

    assert abs(slope(np.zeros_like(x)) + z) < 1e-9
    found = [abs(slope(side * error * pattern) + z) for pattern in patterns for side in (-1, 1)]
    bound = gaussian.joint_slope_error(smoothing, reach=abs(z))
    assert 0.5 * bound < max(found) <= bound
    assert bound <= gaussian.joint_slope_error(smoothing)


# cost and shapes --------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (64,), (6143,), (6200,), (2, 4000)])
@pytest.mark.parametrize("smoothing", [0.0, gaussian.SMOOTHING])
def test_declared_cost_is_the_measured_cost(shape, smoothing):
    def program(party):
        tensor = party.complete(refmpc.joint_gaussian(party, shape, smoothing))
        return tensor, refmpc.joint_gaussian.cost(party, shape, smoothing)

    result = run(program, insecure_seed=1)
    tensor, cost = result.outputs[0]
    assert tensor.shape == shape and tensor.fraction_bits == 30
    assert (result.rounds, result.bytes) == (cost.rounds, cost.bytes)
    assert cost.rounds <= 30
    count = math.prod(shape)
    assert count < 64 or cost.bytes / count <= 1500


def test_ranges_hold_and_no_mask_is_used_twice():
    run(lambda party: party.complete(refmpc.joint_gaussian(party, (2000,))), insecure_check_ranges=True)


def test_unusable_smoothing_is_refused():
    with pytest.raises(ValueError, match="smoothing"):
        gaussian.joint_slope_error(0.0)
    with pytest.raises(refmpc.PartyFailed, match="smoothing"):
        run(lambda party: party.complete(refmpc.joint_gaussian(party, (2,), 0.8)))


# what a server knows ----------------------------------------------------------------------------


def correlation_scores(known, targets):
    """Correlations of each row of ``known`` with each target, in standard deviations under independence."""
    rows = known - known.mean(axis=1, keepdims=True)
    spread = rows.std(axis=1)
    scores = [rows @ (target - target.mean()) / (spread * target.std() * math.sqrt(target.size)) for target in targets]
    return np.concatenate(scores)


def bit_rows(words, width):
    return np.stack([((words >> np.uint64(k)) & np.uint64(1)) for k in range(width)]).astype(np.float64)


def test_no_server_can_correlate_its_part_with_the_sample(smoothed):
    widths = (gaussian.SEGMENT_BITS, gaussian.POSITION_BITS + 1)
    some = slice(0, 2 * CHUNK)
    for known, own, shares in zip(smoothed.known, smoothed.own, smoothed.shares, strict=True):
        joint = (smoothed.z - own)[some]
        known, shares = known[..., some], shares[..., some]
        targets = [joint, joint**2]
        for words, width in zip(known, widths, strict=True):
            for part in (words[0], words[1], words[0] ^ words[1]):
                assert np.abs(correlation_scores(bit_rows(part, width), targets)).max() < 5.5
        for part in (*shares, shares[0] + shares[1]):
            assert np.abs(correlation_scores(part.view(np.int64)[np.newaxis] / 2.0**63, targets)).max() < 5.5
    # the same test on what nobody has: the secret bits themselves
    segments, positions = (bit_rows(w, width) for w, width in zip(smoothed.secret_words[:, some], widths, strict=True))
    assert np.abs(correlation_scores(positions, [smoothed.z[some]])).max() > 100
    assert np.abs(correlation_scores(segments, [smoothed.z[some] ** 2])).max() > 100


def message_departures(transcripts, z, own):
    """Received arrays that are not uniform bytes, or correlate with what the sample is to their receiver."""
    found = []
    for receiver, transcript in enumerate(transcripts):
        joint = z - own[receiver]
        for operation, sender, array in transcript:
            values = np.bincount(np.ascontiguousarray(array).view(np.uint8).reshape(-1), minlength=256)
            if stats.chisquare(values).pvalue < 1e-7:
                found.append(f"{operation}: bytes from {sender} to {receiver}")
            if array.dtype == np.uint64 and array.size % z.size == 0:
                rows = array.reshape(-1, z.size)
                scores = correlation_scores(rows.view(np.int64) / 2.0**63, [joint, joint**2])
                low = correlation_scores((rows & np.uint64(1)).astype(np.float64), [joint, joint**2])
                if max(np.abs(scores).max(), np.abs(low).max()) > 6:
                    found.append(f"{operation}: correlation from {sender} to {receiver}")
    return found


def recorded(seed):
    count = 6080  # a multiple of 64 (no padding), below the size from which dealers rotate inside a vector
    result = run(
        lambda party: sample_with_knowledge(party, 1, count, gaussian.SMOOTHING),
        insecure_seed=seed,
        insecure_record=True,
    )
    z = open_tensors([output[0][0] for output in result.outputs])
    return result.transcripts, z, [output[0][2] for output in result.outputs]


@pytest.mark.parametrize("seed", [1, 2])
def test_every_message_is_uniform_and_independent_of_the_sample(seed):
    transcripts, z, own = recorded(seed)
    assert sum(len(transcript) for transcript in transcripts) > 50
    assert message_departures(transcripts, z, own) == []


def test_an_unmasked_message_would_be_noticed(monkeypatch):
    masked = Operation.zero_share

    def unmasked(self: Operation, shape: tuple[int, ...], kernel: str = "subtract") -> refmpc.Words:
        return refmpc.seal(np.zeros(shape, dtype=np.uint64)) if kernel == "xor" else masked(self, shape, kernel)

    monkeypatch.setattr(Operation, "zero_share", unmasked)
    found = message_departures(*recorded(1))
    assert any("joint_gaussian" in text for text in found)


# distributed ------------------------------------------------------------------------------------

STD, CUT_BITS, ROWS, COLUMNS = 1000.0 * 2**10, 10, 2500, 100


def noised_zero(party, own, rows=ROWS):
    """Zero matrices multiplied, with or without noise: (result, this server's noise)."""
    zeros = refmpc.ArithmeticTensor(party, np.zeros((2, rows, COLUMNS), dtype=np.uint64), 16)
    noise = refmpc.gaussian_addend(party, (rows, COLUMNS), STD, step=3) if own else None
    square = refmpc.ArithmeticTensor(party, np.zeros((2, COLUMNS, COLUMNS), dtype=np.uint64), 16)
    return party.complete(refmpc.matmul_truncate(zeros, square, CUT_BITS, noise)), noise


def test_distributed_noise_is_free_and_has_three_times_the_variance():
    with_noise = run(noised_zero, [True] * 3, insecure_seed=4, insecure_record=True)
    without = run(noised_zero, [False] * 3, insecure_seed=4)
    assert (with_noise.rounds, with_noise.bytes) == (without.rounds, without.bytes)
    total = open_tensors([tensor for tensor, _ in with_noise.outputs]) * 2.0**22
    parts = [noise.view(np.int64).astype(np.float64) for _, noise in with_noise.outputs]
    assert np.abs(total - sum(parts) / 2**CUT_BITS).max() <= 1
    scaled = (total * 2**CUT_BITS).reshape(-1)
    assert departures(scaled, math.sqrt(3) * STD) == []
    assert departures(1.01 * scaled, math.sqrt(3) * STD) != []
    for part in parts:
        assert departures(part.reshape(-1), STD) == []
        assert departures(scaled - part.reshape(-1), math.sqrt(2) * STD) == []


def test_a_servers_own_noise_is_sent_to_nobody():
    result = run(lambda party: noised_zero(party, True, rows=300), insecure_seed=4, insecure_record=True)
    for receiver, transcript in enumerate(result.transcripts):
        words = [part.reshape(-1) for _, _, part in transcript if part.dtype == np.uint64]
        assert words
        for owner in {0, 1, 2} - {receiver}:
            noise = result.outputs[owner][1].reshape(-1)
            for part in words:
                assert np.intersect1d(part, noise).size == 0
        for part in words:
            assert stats.chisquare(np.bincount(part.view(np.uint8), minlength=256)).pvalue > 1e-7


def test_noise_belongs_to_server_and_step():
    def program(party):
        return [refmpc.gaussian_addend(party, (100,), 2.0**30, step) for step in (0, 1, 0)]

    outputs = run(program, insecure_seed=5).outputs
    np.testing.assert_array_equal(outputs[0][0], outputs[0][2])
    distinct = {array.tobytes() for output in outputs for array in output}
    assert len(distinct) == 6


def test_noise_does_not_outlive_the_run():
    """The docstring says so: a server that comes back has another key."""
    once, again = (
        refmpc.run(lambda party: refmpc.gaussian_addend(party, (100,), 2.0**30, 0)).outputs for _ in range(2)
    )
    assert len({array.tobytes() for array in [*once, *again]}) == 6
