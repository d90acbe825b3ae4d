"""A statistical distinguisher for what one party sees.

The view of a party is what it receives, what it draws from the streams it shares with its neighbours, and its result.
Semi-honest security says: given the party's own input shares, that view has the same distribution for any two secrets.
So a case is run on many elements with **constant shares**: the party's own two are the same for both secrets, the third
makes the difference, and all randomness left is that of the masks. Compared are, for the two secrets, every digit of
every message, and of every sum, difference and XOR of a message with anything else in the view: a value under a mask
that the receiver knows, or under none at all, stands out as a constant. Messages must moreover be uniform, and, in
runs on random shares, independent of the party's own shares. All p-values go through one Bonferroni correction.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy import stats

import refmpc
from accel import kernels
from refmpc import Additive, ArithmeticTensor, BooleanTensor, TwoHolderBits
from refmpc.core.party import Operation, Party
from refmpc.primitives.dealing import Dealing

COUNT = 4096  # elements a run: below SMALL, so that each run has one dealer; a multiple of 64
WORD = 2**64
SIGNIFICANCE = 1e-6
_DIGITS = (0, 1, 7, 14, 15)  # which hexadecimal digits of a word are looked at


@dataclass(frozen=True)
class Case:
    """How to run one primitive: input kinds, two very different secrets, the call, and how bytes are packed.

    An input kind is "arithmetic", the width of a Boolean tensor, or ("private", owner) for a value that one party
    brings along. ``packed`` is the modulus of the values in packed messages, or the moduli by the bits that a message
    has for one element; values modulo a prime lie digit by digit, in each line ``beside`` of them for every element. It
    can also be a function of a message's name and these bits that gives both. A ``composed`` protocol, made of
    primitives that have cases of their own, is looked at more coarsely: each message for itself, packed ones byte by
    byte, at one dealer.
    """

    call: Callable[..., Any]
    inputs: tuple[Any, ...]
    secrets: tuple[tuple[int, ...], tuple[int, ...]]
    packed: int | dict[int, int] | Callable[[str, int], tuple[int, int]] = 2
    beside: int = 1
    composed: bool = False
    shape: tuple[int, ...] = ()  # of one element, when a case needs more than a number
    learns: tuple[int, ...] = ()  # parties that may learn the secret
    idle: tuple[tuple[int, int, int], ...] = ()  # draws whose loss is no leak, or none that can be seen


@dataclass
class Block:
    """COUNT samples of k values modulo ``modulus``."""

    name: str
    values: np.ndarray
    modulus: int


@dataclass
class View:
    """What one party sees in one run."""

    messages: list[Block] = field(default_factory=list)
    draws: list[Block] = field(default_factory=list)
    results: list[Block] = field(default_factory=list)
    own_shares: list[np.ndarray] = field(default_factory=list)


# observing --------------------------------------------------------------------------------------


class _Recorded:
    """A mask stream that notes what is drawn from it, and may be told to give zeros for one draw."""

    def __init__(self, stream: Any, label: tuple[int, int], party: Party, plan: _Plan):
        self.stream, self.label, self.party, self.plan = stream, label, party, plan
        self.drawn = 0
        self.quiet = False

    def note(self, values: np.ndarray, modulus: int) -> np.ndarray:
        draw = (*self.label, self.drawn)
        self.drawn += 1
        if draw == self.plan.lost_mask:
            values = np.zeros_like(values)
        self.plan.drawn[self.party.id].append((draw, values.copy(), modulus))
        return values

    def words(self, count: int) -> np.ndarray:
        return self.note(self.stream.words(count), WORD)

    def rows(self, rows: int, count: int) -> np.ndarray:
        drawn = [self.note(row, WORD) for row in self.stream.rows(rows, count)]  # each vector is a draw of its own
        return np.stack(drawn)

    @property
    def position(self) -> int:
        return self.stream.position

    def bytes(self, count: int) -> np.ndarray:
        values = self.stream.bytes(count)
        return values if self.quiet else self.note(values, 256)


@dataclass
class _Plan:
    lost_mask: tuple[int, int, int] | None = None
    drawn: list[list[Any]] = field(default_factory=lambda: [[], [], []])
    computed: list[list[Block]] = field(default_factory=lambda: [[], [], []])

    def known_to(self, party: int) -> list[Any]:
        """What was drawn from this party's streams, by itself or by the neighbour who shares them."""
        pairs = (party, (party - 1) % 3)
        found = {draw: (draw, values, modulus) for drawn in self.drawn for draw, values, modulus in drawn}
        return [found[draw] for draw in sorted(found) if draw[0] in pairs and found[draw][1].size]


_PADDED = {"octave_bits": 2, "exp_below_bits": 3}  # which argument is the pad


def watch_streams(monkeypatch: Any) -> None:
    """Let runs of ``observe`` note every draw."""
    mask_stream, uniform_below = Party.mask_stream, Operation.uniform_below

    def watched_stream(self: Party, side: str, number: int) -> Any:
        stream = mask_stream(self, side, number)
        plan = getattr(self, "plan", None)
        pair = self.id if side == "next" else self.previous
        return stream if plan is None else _Recorded(stream, (pair, number), self, plan)

    def watched_uniform(self: Operation, source: Any, bound: int, shape: tuple[int, ...]) -> np.ndarray:
        if not isinstance(source, _Recorded):
            return uniform_below(self, source, bound, shape)
        stream: Any = source
        stream.quiet = True
        values = uniform_below(self, stream, bound, shape)
        stream.quiet = False
        return stream.note(values, bound)

    call = Dealing.call

    def watched_call(self: Dealing, kernel: str, *arguments: Any) -> None:
        """Bits that a holder sends under a pad: it knows them itself, but they are no linear function of its view."""
        call(self, kernel, *arguments)
        plan = getattr(self.party, "plan", None)
        if plan is not None and kernel in _PADDED:
            pads, out = (refmpc.unseal(arguments[at]) for at in (_PADDED[kernel], -1))
            own = (out ^ pads.astype(np.uint8)) & np.uint8(3)
            plan.computed[self.party.id].append(Block(f"own bits of {kernel}", own.reshape(COUNT, -1), 4))

    monkeypatch.setattr(Dealing, "call", watched_call)
    monkeypatch.setattr(Party, "mask_stream", watched_stream)
    monkeypatch.setattr(Operation, "uniform_below", watched_uniform)


def _shares(
    kind: Any, secret: int, constant_for: int | None, shape: tuple[int, ...], rng: np.random.Generator
) -> list[Any]:
    """Three replicated share pairs; constant over the elements, and the same two for ``constant_for``, or random."""
    if isinstance(kind, tuple):
        return [np.full(shape, secret) if i == kind[1] else None for i in range(3)]
    low = np.uint64(WORD - 1 if kind == "arithmetic" else 2**kind - 1)
    draw = shape if constant_for is None else ()
    free = [np.broadcast_to(rng.integers(0, WORD - 1, draw, np.uint64, endpoint=True) & low, shape) for _ in range(2)]
    word = np.uint64(secret % WORD)
    last = word - free[0] - free[1] if kind == "arithmetic" else word ^ free[0] ^ free[1]
    start = constant_for or 0
    parts = {start: free[0], (start + 1) % 3: free[1], (start + 2) % 3: last & low}
    return [np.stack([parts[i], parts[(i + 1) % 3]]) for i in range(3)]


def observe(
    case: Case,
    secret: int,
    seed: int,
    *,
    constant_for: int | None,
    begun: int = 0,
    lost_mask: tuple[int, int, int] | None = None,
) -> tuple[list[View], _Plan]:
    """The three views of one run on one of the two secrets."""
    rng = np.random.default_rng(seed)
    shape = (COUNT, *case.shape)
    shares = [
        _shares(kind, value, constant_for, shape, rng)
        for kind, value in zip(case.inputs, case.secrets[secret], strict=True)
    ]
    plan = _Plan(lost_mask)

    def program(party: Party) -> list[Block]:
        for _ in range(begun):
            party.operation("begun before")
        tensors: list[Any] = []
        for kind, parts in zip(case.inputs, shares, strict=True):
            mine = parts[party.id]
            if kind == "arithmetic":
                tensors.append(ArithmeticTensor(party, mine, 16))
            else:
                tensors.append(mine if isinstance(kind, tuple) else BooleanTensor(party, mine, kind))
        party.plan = plan  # type: ignore[attr-defined]
        output = case.call(party, *tensors)
        if inspect.iscoroutine(output):
            output = party.complete(output)
        return _output_blocks(output)

    with warnings.catch_warnings(), np.errstate(over="ignore"):
        warnings.filterwarnings("ignore", message="insecure_")
        run = refmpc.run(
            program, insecure_seed=seed * 2 + secret, insecure_record=True, releases={"example": "an example"}
        )
    views = []
    for i in range(3):
        view = View()
        for number, (operation, peer, message) in enumerate(run.transcripts[i]):
            view.messages += _message_blocks(f"{number}: {operation} from {peer}", message, case)
        for draw, values, modulus in plan.known_to(i):
            view.draws += _word_blocks(f"draw {draw}", values, modulus)
        view.draws += plan.computed[i]
        view.results += run.outputs[i]
        for kind, parts in zip(case.inputs, shares, strict=True):
            if not isinstance(kind, tuple):
                view.own_shares += [np.asarray(share).reshape(COUNT, -1)[:, 0] for share in parts[i]]
        views.append(view)
    return views, plan


def _word_blocks(name: str, values: np.ndarray, modulus: int) -> list[Block]:
    if values.size % (COUNT // 64):
        return []  # of no element: a sum over all of them
    planes = values.dtype == np.uint64 and values.size % COUNT != 0
    if planes:  # bit-sliced words: one bit of 64 elements each
        rows = values.reshape(-1, COUNT // 64)
        bits = np.unpackbits(rows.view(np.uint8), axis=1, bitorder="little")
        return [Block(name, bits.T.astype(np.uint64), 2)]
    if values.size % COUNT:
        return []  # packed random bits: seen through the shares they become
    if values.ndim == 2 and values.shape[1] % COUNT == 0 and values.shape[0] != COUNT:
        values = _by_element(values, values.shape[1] // COUNT)
    return [Block(name, values.reshape(COUNT, -1).astype(np.uint64), modulus)]


def _by_element(lines: np.ndarray, beside: int) -> np.ndarray:
    """A row for each element, of values that lie in one line for each digit."""
    return lines.reshape(-1, COUNT, beside).transpose(1, 0, 2).reshape(COUNT, -1)


def _message_blocks(name: str, message: np.ndarray, case: Case) -> list[Block]:
    if message.dtype == np.uint64:
        return _word_blocks(name, message, WORD)
    if case.composed:  # values of 3 to 6 bits lie across bytes: 15 bytes apart they are independent
        rows = message[: message.size // 15 * 15].reshape(-1, 15)
        return [Block(name, rows.astype(np.uint64), 256)]
    if message.size * 8 < COUNT:
        return []  # of no element: a sum over all of them
    bits, beside = message.size * 8 // COUNT, case.beside
    if callable(case.packed):
        packed, beside = case.packed(name, bits)
    else:
        packed = case.packed if isinstance(case.packed, int) else case.packed[bits]
    width = (packed - 1).bit_length()
    count = message.size * 8 // width
    assert count % COUNT == 0, f"{name}: {message.size} bytes are not values of {width} bits for {COUNT} elements"
    values = kernels.unpack_bits(message, width, count)
    if packed & (packed - 1):  # comparisons send their values modulo a prime digit by digit
        return [Block(name, _by_element(values, beside), packed)]
    return [Block(name, values.reshape(COUNT, -1), packed)]


def _output_blocks(output: Any) -> list[Block]:
    if isinstance(output, list | tuple):
        return [block for item in output for block in _output_blocks(item)]
    if isinstance(output, TwoHolderBits):
        return [Block("own bit of the result", refmpc.unseal(output.held).reshape(COUNT, -1).astype(np.uint64), 2)]
    if isinstance(output, Additive):
        own = refmpc.unseal(output.words).reshape(COUNT, -1).copy()
        return [Block("own summand of the result", own, 2**output.bits)]
    if isinstance(output, ArithmeticTensor | BooleanTensor):
        modulus = 2**output.width if isinstance(output, BooleanTensor) else WORD
        return [
            Block(f"share {i} of the result", share.reshape(COUNT, -1).copy(), modulus)
            for i, share in enumerate(refmpc.unseal(output.shares))
        ]
    return []


# statistics -------------------------------------------------------------------------------------


def _digits(values: np.ndarray, modulus: int) -> Iterator[tuple[str, np.ndarray, int]]:
    """Small digits (name, (COUNT, k) values, base) that a block is counted by."""
    width = modulus.bit_length() - 1
    if modulus <= 256:
        yield "value", values.astype(np.int64), modulus
    elif modulus == WORD:
        for place in _DIGITS:
            yield f"digit {place}", ((values >> np.uint64(4 * place)) & np.uint64(15)).astype(np.int64), 16
    else:
        for start in range(0, width, 4):
            bits = min(4, width - start)
            digit = (values >> np.uint64(start)) & np.uint64(2**bits - 1)
            yield f"bits from {start}", digit.astype(np.int64), 2**bits


def _counts(digits: np.ndarray, base: int) -> np.ndarray:
    """(k, base) counts of each column."""
    k = digits.shape[1]
    return np.bincount((digits + base * np.arange(k)).reshape(-1), minlength=base * k).reshape(k, base)


def _two_sample(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """p-values of equal distribution of equally large samples, from counts (k, base)."""
    both = a + b
    terms = np.where(both > 0, (a - b) ** 2 / np.maximum(both, 1), 0.0)
    freedom = (both > 0).sum(axis=1) - 1
    return np.where(freedom > 0, stats.chi2.sf(terms.sum(axis=1), np.maximum(freedom, 1)), 1.0)


def _uniform(counts: np.ndarray) -> np.ndarray:
    expected = counts.sum(axis=1, keepdims=True) / counts.shape[1]
    return stats.chi2.sf(((counts - expected) ** 2 / expected).sum(axis=1), counts.shape[1] - 1)


def _combined(message: Block, other: Block) -> Iterator[tuple[str, np.ndarray, int]]:
    """Sums, differences and XORs of a message with something else of the view."""
    values, modulus = message.values, message.modulus
    others = [("", other.values)]
    if other.modulus != modulus:
        if other.modulus != WORD or modulus & (modulus - 1) or modulus <= 2:
            return
        width = modulus.bit_length() - 1
        others = [
            ("top of ", other.values >> np.uint64(64 - width)),
            ("low of ", other.values & np.uint64(modulus - 1)),
        ]
    for part, known in others:
        if known.shape[1] != values.shape[1] and 1 not in (known.shape[1], values.shape[1]):
            continue
        if modulus & (modulus - 1) == 0:
            low = np.uint64(modulus - 1)
            yield f"plus {part}{other.name}", (values + known) & low, modulus
            if modulus > 2:
                yield f"minus {part}{other.name}", (values - known) & low, modulus
                yield f"xor {part}{other.name}", values ^ known, modulus
        else:
            prime = np.uint64(modulus)
            yield f"plus {other.name}", (values + known) % prime, modulus
            yield f"minus {other.name}", (values + prime - known) % prime, modulus


def _joint(message: Block, other: Block) -> np.ndarray | None:
    """Counts of pairs of values, every column with every column, when they are few."""
    if message.modulus * other.modulus > 64 or message.values.shape[1] * other.values.shape[1] > 64:
        return None
    pairs = message.values[:, :, np.newaxis] * np.uint64(other.modulus) + other.values[:, np.newaxis, :]
    return _counts(pairs.reshape(COUNT, -1).astype(np.int64), message.modulus * other.modulus)


def compare_views(a: View, b: View) -> Iterator[tuple[str, np.ndarray]]:
    """p-values of every test on two views of the same party under the two secrets."""
    assert [m.name for m in a.messages] == [m.name for m in b.messages], "the messages themselves tell the secret"
    yield from _linearly_dependent(a)
    learned = list(zip([*a.messages, *a.results], [*b.messages, *b.results], strict=True))
    drawn = list(zip(a.draws, b.draws, strict=True))
    for index, (one, two) in enumerate(learned):
        is_message = index < len(a.messages)
        yield from _digit_tests(one.name, one, two, uniform=is_message)
        if is_message and one.modulus == WORD:
            column = (one.values[:, 0].astype(np.float64), two.values[:, 0].astype(np.float64))
            yield f"{one.name}: Kolmogorov-Smirnov", np.array([stats.ks_2samp(*column, method="asymp").pvalue])
        for other_a, other_b in [*learned[index + 1 :], *drawn]:
            # a message is independent of what the party has drawn; with results it need only not tell the secret
            uniform = is_message and any(other_a is block for block in a.draws)
            for (name, left, modulus), (_, right, _) in zip(
                _combined(one, other_a), _combined(two, other_b), strict=True
            ):
                yield from _digit_tests(
                    f"{one.name} {name}", Block("", left, modulus), Block("", right, modulus), uniform=uniform
                )
            joint_a, joint_b = _joint(one, other_a), _joint(two, other_b)
            if joint_a is not None and joint_b is not None:
                yield f"{one.name} together with {other_a.name}: differs", _two_sample(joint_a, joint_b)


def compare_messages(a: View, b: View) -> Iterator[tuple[str, np.ndarray]]:
    """The same for a composed protocol: each message and each result for itself."""
    assert [m.name for m in a.messages] == [m.name for m in b.messages], "the messages themselves tell the secret"
    for one, two in zip([*a.messages, *a.results], [*b.messages, *b.results], strict=True):
        yield from _digit_tests(
            one.name, one, two, uniform=one.modulus == WORD and any(one is message for message in a.messages)
        )


def _digit_tests(name: str, a: Block, b: Block, *, uniform: bool) -> Iterator[tuple[str, np.ndarray]]:
    pairs = zip(_digits(a.values, a.modulus), _digits(b.values, b.modulus), strict=True)
    for (digit, left, base), (_, right, _) in pairs:
        counts = _counts(left, base), _counts(right, base)
        yield f"{name}, {digit}: differs", _two_sample(*counts)
        if uniform:
            yield f"{name}, {digit}: not uniform", _uniform(counts[0] + counts[1])


def _linearly_dependent(view: View) -> Iterator[tuple[str, np.ndarray]]:
    """p = 0 for a message bit that is an affine function (over bits) of what was drawn and of other messages.

    Independent bits of COUNT samples are linearly independent but for a chance of 2^(columns − COUNT). All bits of
    words are taken as columns, so sums show in their lowest bit.
    """
    columns: list[tuple[str, np.ndarray]] = [("", np.ones((1, COUNT), dtype=np.uint8))]
    for block in [*view.draws, *view.messages]:
        width = block.modulus.bit_length() - 1
        if block.modulus & (block.modulus - 1) == 0 and block.values.shape[1] * width < 400:
            bits = (block.values[:, :, np.newaxis] >> np.arange(width, dtype=np.uint64)) & np.uint64(1)
            name = "" if any(block is draw for draw in view.draws) else block.name
            columns.append((name, bits.reshape(COUNT, -1).T.astype(np.uint8)))
    names = [name for name, bits in columns for _ in bits]
    rows = np.ascontiguousarray(np.packbits(np.concatenate([bits for _, bits in columns]), axis=1)).view(np.uint64)
    if len(rows) > COUNT - 200:
        return
    for at in range(len(rows)):
        words = np.flatnonzero(rows[at])
        if not words.size:
            if names[at]:
                yield f"{names[at]}: a bit follows from what the party knows", np.zeros(1)
            continue
        word = words[0]
        bit = rows[at, word] & (~rows[at, word] + np.uint64(1))
        below = at + 1 + np.flatnonzero(rows[at + 1 :, word] & bit)
        rows[below] ^= rows[at]


def independent_of_own_shares(view: View) -> Iterator[tuple[str, np.ndarray]]:
    """p-values of independence of each message digit from the top digit of the party's own shares."""
    for share_number, share in enumerate(view.own_shares):
        shift = np.uint64(60 if share.max() >= 2**60 else 0)
        own = ((share >> shift) & np.uint64(15)).astype(np.int64)
        for message in view.messages:
            *_, (name, digits, base) = _digits(message.values, message.modulus)
            table = np.stack([_counts(digits[own == d], base) for d in range(16) if (own == d).any()], axis=1)
            expected = table.sum(axis=2, keepdims=True) * table.sum(axis=1, keepdims=True) / COUNT
            terms = np.where(expected > 0, (table - expected) ** 2 / np.maximum(expected, 1e-9), 0.0).sum(axis=(1, 2))
            freedom = max(1, (table.shape[1] - 1) * (base - 1))
            yield f"{message.name}, {name}: depends on own share {share_number}", stats.chi2.sf(terms, freedom)


def leaks(case: Case, *, seed: int = 1, turns: tuple[int, ...] = (0, 1, 2)) -> list[str]:
    """What tells the two secrets apart, most telling first; empty if nothing does. ``turns`` are dealers."""
    found: list[tuple[str, float]] = []
    tests = 0
    for name, p_values in _all_tests(case, seed, turns, None):
        tests += p_values.size
        found.append((name, float(p_values.min(initial=1.0))))
    threshold = SIGNIFICANCE / max(1, tests)
    return [f"{name} (p = {p:.1e})" for name, p in sorted(found, key=lambda item: item[1]) if p < threshold]


def finds_a_leak(case: Case, *, lost_mask: tuple[int, int, int] | None = None, seeds: range = range(1, 9)) -> bool:
    """Whether the same tests find a planted leak: on some constant shares, and far beyond the corrected threshold
    (SIGNIFICANCE over at most a million tests)."""
    return any(
        p_values.min(initial=1.0) < SIGNIFICANCE / 1e6
        for seed in seeds
        for _, p_values in _all_tests(case, seed, (0,), lost_mask)
    )


def _all_tests(
    case: Case, seed: int, turns: tuple[int, ...], lost_mask: tuple[int, int, int] | None
) -> Iterator[tuple[str, np.ndarray]]:
    owners = {kind[1] for kind in case.inputs if isinstance(kind, tuple)}
    blind = [i for i in range(3) if i not in owners and i not in case.learns]
    for begun in turns[:1] if case.composed else turns:
        for party in blind:
            options: dict[str, Any] = {"constant_for": party, "begun": begun, "lost_mask": lost_mask}
            a, b = (observe(case, secret, seed + 10 * begun, **options)[0][party] for secret in range(2))
            for name, p_values in compare_messages(a, b) if case.composed else compare_views(a, b):
                yield f"party {party}, {name}", p_values
        for secret in range(0 if case.composed else 2):
            views, _ = observe(case, secret, seed + 5, constant_for=None, begun=begun, lost_mask=lost_mask)
            for party in blind:
                for name, p_values in independent_of_own_shares(views[party]):
                    yield f"party {party}, {name}", p_values


def draws(case: Case) -> list[tuple[int, int, int]]:
    """Every draw from a pair stream in one run: (first party of the pair, operation, index)."""
    _, plan = observe(case, 0, 1, constant_for=0)
    return sorted({draw for drawn in plan.drawn for draw, values, _ in drawn if values.size})
