"""Recorded steps: every byte that is sent, and every result, is that of the same call without recording."""

import queue
from typing import Any

import numpy as np
import pytest

import refmpc
import refmpc.core.party as party_module
import refmpc.core.program as program_module
from accel.prg import StreamKey
from refmpc import PROTOCOLS, NotRecordable, OutOfStep, PartyFailed
from refmpc.core.party import SMALL
from refmpc.net.framing import ThreadTransport
from tests.refmpc.harness import Secret, outputs_of, packed, random_signed
from tests.refmpc.openings import OPENED, OPENS_RELEASES, nothing, opens
from tests.refmpc.test_cost import EXAMPLES

CALLS = 4  # the first is recorded, at whatever place in the rotation of dealers it begins
EAGER_ONLY = {
    "input_from_party",
    "reveal",
    "open_words",
    "joint_gaussian",
}  # they draw, send or open what no repetition may repeat


@pytest.fixture
def sent(monkeypatch):
    """Everything that parties of a run send, with the codes of the frames, by party."""
    log: dict[int, list[Any]] = {}
    exchange = ThreadTransport.exchange

    def logged(self, operation, sends, receives, code=0):
        for peer, parts in sends.items():
            message = b"".join(np.ascontiguousarray(part).tobytes() for part in parts)
            log.setdefault(id(self), []).append((operation, peer, code, message))
        exchange(self, operation, sends, receives, code)

    monkeypatch.setattr(ThreadTransport, "exchange", logged)
    return log


def run(sent, function, secrets, monkeypatch, recording, calls=CALLS, **options):
    """All messages of all parties, and all results, of calls of ``function(party, *tensors)`` on fresh shares."""
    monkeypatch.setenv("REFMPC_RECORD", "1" if recording else "0")
    sent.clear()
    rng = np.random.default_rng(5)
    shares = [[secret.shares(rng) for secret in secrets] for _ in range(calls)]

    def program(party):
        step = party.recorded(lambda *tensors: function(party, *tensors))
        results = []
        for number, inputs in enumerate(shares):
            party.step = number // 2
            for _ in range(number % 3):  # what comes before a call must make no difference to it
                party.operation("something else")
            tensors = [secret.tensor(party, each[party.id]) for secret, each in zip(secrets, inputs, strict=True)]
            result = party.complete(step(*tensors))
            results.append((packed(result), _histories(result)))
        kept = [p for p in getattr(step, "_programs", {}).values() if p is not None]
        return results, party.operations, len(kept), id(party.transport), party.ledger.total()

    with pytest.warns(UserWarning, match="insecure_seed"):
        result = refmpc.run(program, insecure_seed=3, timeout=20, **options)
    messages = [sent[transport] for _, _, _, transport, _ in result.outputs]
    counters = [(c.rounds, c.bytes_sent, c.frames_sent) for *_, c in result.outputs]
    programs = {kept for _, _, kept, _, _ in result.outputs}
    return messages, [output[:2] for output in result.outputs], counters, programs


def _histories(result):
    return [_histories(item) for item in result] if isinstance(result, list | tuple) else getattr(result, "history", 0)


def same(left, right):
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    return left == right


def assert_same_with_and_without(sent, function, secrets, monkeypatch, **options):
    eager = run(sent, function, secrets, monkeypatch, recording=False, **options)
    recorded = run(sent, function, secrets, monkeypatch, recording=True, **options)
    assert eager[3] == {0} and recorded[3] == {1}
    assert recorded[0] == eager[0], "other messages"
    assert same(recorded[1], eager[1]), "other results"
    assert recorded[2] == eager[2], "other counters"


@pytest.mark.parametrize("name", sorted(set(PROTOCOLS) - EAGER_ONLY))
def test_a_recorded_primitive_sends_and_computes_what_it_does_otherwise(name, sent, monkeypatch):
    examples = [example for example in EXAMPLES[name] if all(np.size(s.values) < 20_000 for s in example[0])]
    for secrets, arguments in examples[:: max(1, len(examples) // 4)]:

        def function(party, *tensors, arguments=arguments):
            return PROTOCOLS[name](*arguments(party, *tensors))

        assert_same_with_and_without(sent, function, secrets, monkeypatch)


def test_openings_of_several_kinds_send_and_leave_behind_what_they_do_without_recording(sent, monkeypatch):
    found = []
    for recording in ("0", "1"):
        monkeypatch.setenv("REFMPC_RECORD", recording)
        sent.clear()
        with pytest.warns(UserWarning, match="insecure_seed"):
            result = refmpc.run(opens, [nothing] * 3, insecure_seed=4, releases=OPENS_RELEASES, timeout=20)
        for results, operations, releases, programs, transport in result.outputs:
            assert releases == [(OPENED[turn % 4][2], OPENED[turn % 4][0], "all servers") for turn in range(11)]
            assert programs == [4 if recording == "1" else 0]
            found.append((results, operations, sent[transport]))
    for eager, recorded in zip(found[:3], found[3:], strict=True):
        assert same(eager[0], recorded[0]) and eager[1] == recorded[1]
        assert eager[2] == recorded[2], "other messages"


def numbers(*shape, bits=16):
    return Secret(random_signed(len(shape), shape, bits=20), bits)


def test_protocols_side_by_side_and_local_operations_are_repeated(sent, monkeypatch):
    async def function(party, x, y):
        first, second, bits = await refmpc.gather(
            refmpc.multiply_truncate(x, y, 16), refmpc.exp(-x, 0.0, -20.0), refmpc.is_negative(y)
        )
        joined = refmpc.concatenate([first, second.reinterpret(16), (3.0 - x)[::-1]])
        chosen = await refmpc.select(bits, x + y)
        return {"joined": joined.T, "rest": (chosen.sum(), bits, [joined[[2, 0, 1]]], None, x)}

    secrets = [numbers(128), numbers(128)]
    assert_same_with_and_without(sent, lambda party, x, y: _listed(function(party, x, y)), secrets, monkeypatch)


async def _listed(call):
    found = await call
    return [found["joined"], *found["rest"][:2], found["rest"][2][0], found["rest"][4]]


@pytest.mark.parametrize("layout", ["transposed", "strided", "reversed"])
@pytest.mark.parametrize("count", [1, SMALL - 1, SMALL, 20_010])
def test_inputs_of_any_size_and_layout_are_taken_where_they_lie(layout, count, sent, monkeypatch):
    secrets = [Secret(random_signed(1, (1, count), bits=20), 16, layout=layout), numbers(count, 1)]

    def function(party, x, y):
        return refmpc.matmul_truncate(y, x[:, :1] + 1.0, 16)

    assert_same_with_and_without(sent, function, secrets, monkeypatch, calls=5)


def shared(party, values, bits=16):
    return party.complete(refmpc.input_from_party(party, 0, values if party.id == 0 else None, np.shape(values), bits))


def test_results_are_not_overwritten_by_later_calls():
    def program(party):
        x = shared(party, np.arange(5.0))

        async def double(x):
            return await refmpc.multiply_truncate(x, x, 16)

        step = party.recorded(double)
        results = [party.complete(step(x + float(i))) for i in range(8)]
        return [party.complete(refmpc.reveal(result, release="test")) for result in results]

    for opened in outputs_of(program, {"test": "none"}):
        for i, values in enumerate(opened):
            assert np.abs(values - (np.arange(5.0) + i) ** 2).max() < 2.0**-15


def test_the_same_array_twice_and_two_arrays_are_different_programs():
    def program(party):
        x, y = shared(party, np.full(4, 3.0)), shared(party, np.full(4, 5.0))

        async def product(x, y):
            return await refmpc.multiply_truncate(x, y, 16)

        step = party.recorded(product)
        pairs = [(x, x), (x, y), (y, y), (y, x), (x, x), (x, y)]
        results = [party.complete(step(*pair)) for pair in pairs]
        return [float(party.complete(refmpc.reveal(each, release="test"))[0]) for each in results]

    for opened in outputs_of(program, {"test": "none"}):
        assert np.abs(np.array(opened) - [9, 15, 25, 15, 9, 15]).max() < 2.0**-15


def test_inputs_that_overlap_in_part_run_as_they_are():
    def program(party):
        x = shared(party, np.arange(6.0))

        async def product(x, y):
            return await refmpc.multiply_truncate(x, y, 16)

        step = party.recorded(product)
        result = party.complete(step(x[:4], x[2:]))
        return party.complete(refmpc.reveal(result, release="test")), len(step._programs)

    for values, programs in outputs_of(program, {"test": "none"}):
        assert np.abs(values - np.arange(4) * np.arange(2, 6)).max() < 2.0**-15 and programs == 0


def test_a_step_that_would_keep_too_much_memory_runs_as_it_is(monkeypatch):
    monkeypatch.setattr(program_module, "MOST_BYTES", 100_000)

    def program(party):
        x = shared(party, np.ones(3000))

        async def product(x):
            return await refmpc.multiply_truncate(x, x, 16)

        step = party.recorded(product)
        results = [party.complete(step(x)) for _ in range(4)]
        kept = [each for each in step._programs.values() if each is not None]
        return [float(party.complete(refmpc.reveal(each, release="test"))[7]) for each in results], len(kept)

    assert outputs_of(program, {"test": "none"}) == [([1.0] * 4, 0)] * 3


REFUSED: dict[str, tuple[Any, str]] = {
    "a release": (lambda party, x: refmpc.reveal(x, release="test"), "the release 'test' inside a recorded step"),
    "an opening": (
        lambda party, x: refmpc.open_words(party, refmpc.tensor_opening(x, 40), 40, "test"),
        "the release 'test' inside a recorded step",
    ),
    "an opening to a client": (
        lambda party, x: _opened_to_client(party, refmpc.tensor_opening(x, 40)),
        "the release 'test' inside a recorded step",
    ),
    "an input": (lambda party, x: refmpc.input_from_party(party, 0, [1.0], (1,)), "an input inside a recorded step"),
    "joint noise": (lambda party, x: refmpc.joint_gaussian(party, (3,)), "inside a recorded step"),
    "own noise": (lambda party, x: _now(party.private_stream("noise")), "a private stream .* inside a recorded step"),
    "the step's number": (lambda party, x: _now(party.step), "the number of the step inside a recorded step"),
    "a client": (lambda party, x: _now(party.send("x", "bank", [])), "a message to 'bank' inside a recorded step"),
    "numpy": (lambda party, x: _now(party.machine.unsealed(x.first)), "a computation outside kernels inside"),
    "a tensor from elsewhere": (lambda party, x: refmpc.multiply(x, party.elsewhere), "neither an input of the step"),
    "an array from elsewhere": (
        lambda party, x: refmpc.multiply_truncate(x, x, 16, np.ones(3, np.int64)),
        "neither an input of the step",
    ),
    "a value behind the seal's back": (
        lambda party, x: _now(party.machine.call("copy", refmpc.seal(np.asarray(x.first) + np.uint64(1)), x.second)),
        "neither an input of the step",
    ),
    "an unhashable argument": (None, "as a public argument"),
}


async def _now(value):
    return value


async def _opened_to_client(party, words):
    refmpc.open_to_client(party, words, "bank", "test")


@pytest.mark.parametrize("what", REFUSED)
def test_what_must_happen_anew_is_refused_in_a_recorded_step(what):
    function, sentence = REFUSED[what]

    def program(party):
        x = shared(party, np.ones(3))
        party.elsewhere = shared(party, np.ones(3))
        if function is None:
            party.complete(party.recorded(lambda x, y: _now(x))(x, {1, 2}))
        party.complete(party.recorded(lambda x: function(party, x))(x))

    with pytest.raises(PartyFailed, match=sentence) as failure:
        outputs_of(program, {"test": "none"})
    assert isinstance(failure.value.__cause__, TypeError if function is None else NotRecordable)


@pytest.mark.parametrize("option", ["insecure_check_ranges", "insecure_record"])
def test_debug_modes_run_as_they_are(option):
    def program(party):
        step = party.recorded(lambda x: refmpc.multiply_truncate(x, x, 16))
        x = shared(party, np.ones(3))
        for _ in range(4):
            party.complete(step(x))
        return len(step._programs)

    with pytest.warns(UserWarning, match=option):
        assert outputs_of(program, **{option: True}) == [0, 0, 0]


@pytest.mark.parametrize("what", ["a public input", "the order of inputs", "the step"])
def test_parties_that_differ_in_what_is_public_notice_in_a_repetition(what):
    def program(party):
        x, y = shared(party, np.ones(4)), shared(party, np.ones(4))

        async def scaled(x, y, factor):
            return await refmpc.multiply_truncate(x.scale_by_integers(factor), y, 16)

        step = party.recorded(scaled)
        for call in range(8):
            odd = party.id == 1 and call == 7
            factor = party.machine.public([3 if odd and what == "a public input" else 2], np.uint64)
            party.step = call + (odd and what == "the step")
            party.complete(step(*((y, x) if odd and what == "the order of inputs" else (x, y)), factor))

    with pytest.raises(PartyFailed, match="its step, its number of operations or its public arguments") as failure:
        outputs_of(program)
    assert isinstance(failure.value.__cause__, OutOfStep)
    assert "here this is step 7, operation" in str(failure.value) or what == "the step"


def test_no_mask_is_drawn_twice_over_recorded_steps(monkeypatch):
    """Every block that is encrypted, by streams or by programs: (key, nonce, number)."""
    seen, encrypt, blocks = [], StreamKey.encrypt, StreamKey.blocks

    def noted_encrypt(self, numbered, out):
        seen.append((id(self), numbered.copy()))
        encrypt(self, numbered, out)

    def noted_blocks(self, nonce, first, count):
        counters = np.arange(first, first + count, dtype=">u8").view(np.uint64)
        seen.append((id(self), np.stack([np.full(count, nonce, np.uint64), counters], axis=1)))
        return blocks(self, nonce, first, count)

    def program(party):
        x = shared(party, np.ones(300))

        async def function(x):
            return await refmpc.softmax(x.reshape(30, 10), 18, 28)

        step, calls = party.recorded(function), []
        for call in range(7):
            party.step = call // 3
            for used in (step(x), refmpc.truncate(x, 3)):
                before = len(seen)
                party.complete(used)
                calls.append(
                    [(who, numbered) for who, numbered in seen[before:] if who in map(id, party._keys.values())]
                )
        return calls

    monkeypatch.setattr(StreamKey, "encrypt", noted_encrypt)
    monkeypatch.setattr(StreamKey, "blocks", noted_blocks)
    for calls in outputs_of(program):
        nonces = [{(who, int(nonce)) for who, numbered in drawn for nonce in numbered[:, 0]} for drawn in calls]
        assert len(nonces[0]) > 20 and all(nonces)
        assert sum(map(len, nonces)) == len(set().union(*nonces)), "two calls drew under one nonce"


def test_a_draw_whose_bytes_do_not_last_takes_the_reserve_and_nothing_else_moves(sent, monkeypatch):
    plenty = party_module.uniform_bytes

    def short(count, bound):
        return plenty(count, bound) // 2 + 1

    monkeypatch.setattr(party_module, "uniform_bytes", short)
    monkeypatch.setattr(program_module, "uniform_bytes", short)
    assert_same_with_and_without(sent, lambda party, x: refmpc.is_negative(x, 0, 20), [numbers(300)], monkeypatch)


def test_a_message_between_threads_does_not_change_when_its_memory_is_written_to_again():
    """A party that lags behind read what a repetition had put there since."""
    link: queue.SimpleQueue[Any] = queue.SimpleQueue()
    sender = ThreadTransport({1: link}, {}, timeout=1)
    message = np.arange(5, dtype=np.uint64)
    sender.exchange("example", {1: [message]}, {})
    message[:] = 0
    assert link.get()[1][0].tolist() == [0, 1, 2, 3, 4]
