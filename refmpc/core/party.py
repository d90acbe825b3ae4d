"""One party of a computation: its streams, its channels, its ledger."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from accel import kernels
from accel.prg import KEY_BYTES, Stream, StreamKey
from accel.validate import require_integer
from refmpc.core.digest import digest, mix, name_digest
from refmpc.core.errors import OutOfStep
from refmpc.core.ledger import Counters, Ledger
from refmpc.core.machine import Machine
from refmpc.core.rounds import Round, complete
from refmpc.core.words import Words
from refmpc.net.framing import Peer, Transport

if TYPE_CHECKING:
    from refmpc.core.draws import Draws

__all__ = ["Operation", "Party", "Segment", "fill_from_reserve", "segment_sizes", "uniform_bytes"]

_ARRIVAL = name_digest("arrival")
_PER_STEP, _PER_NUMBER = 0x9E3779B1, 0x85EBCA77  # odd, so that neighbouring steps and numbers have other codes
SMALL = 6144  # below this many elements the dealer is not rotated inside a vector, only from operation to operation


class Segment:
    """A stretch of a flat vector with one dealer. Roles as in PROTOCOLS: 2 deals, 0 and 1 hold c."""

    __slots__ = ("dealer", "size", "slice")

    def __init__(self, dealer: int, start: int, stop: int):
        self.dealer = dealer
        self.slice = slice(start, stop)
        self.size = stop - start

    def role(self, party: int) -> int:
        """The role of a party: the dealer is 2, the party after it 0, the one before it 1."""
        return (party - self.dealer - 1) % 3


def segment_sizes(count: int) -> list[int]:
    """Into how many stretches, and how long, a vector of ``count`` elements is dealt."""
    if count < SMALL:
        return [count]
    third = -(-count // 3)
    third += -third % 64  # whole words of packed bits
    return [third, third, count - 2 * third]


class Operation:
    """One execution of one primitive: its number, its name, and the randomness that belongs to it alone.

    ``code`` goes into the header of each of its frames: step, number and the digest of name and public arguments.
    """

    __slots__ = ("_next", "_previous", "code", "digest", "name", "number", "party")

    def __init__(self, party: Party, name: str, number: int, digest: int = 0):
        self.party = party
        self.name = name
        self.number = number
        self.digest = digest
        self.code = ((digest >> 32) + party.code_base + party.counted(number) * _PER_NUMBER) & 0xFFFFFFFF
        self._next: Stream | None = None
        self._previous: Stream | None = None

    @property
    def machine(self) -> Machine:
        """Where this operation draws and computes."""
        return self.party.machine

    def stream(self, side: str) -> Stream:
        """The stream this operation shares with the "next" or "previous" party (and with nobody else)."""
        if side == "next":
            if self._next is None:
                self._next = self.party.mask_stream("next", self.number)
            return self._next
        if self._previous is None:
            self._previous = self.party.mask_stream("previous", self.number)
        return self._previous

    def round(self) -> Round:
        """A new round of this operation."""
        return Round(self.name, self.code, (self.number,), self.party.machine)

    def history(self, output: int = 0) -> int:
        """The history of a tensor that this operation makes."""
        return mix(self.digest, self.party.counted(self.number), output)

    def segments(self, count: int) -> list[Segment]:
        """The stretches of a vector of ``count`` elements, with rotating dealers."""
        start, found = 0, []
        for index, size in enumerate(segment_sizes(count)):
            found.append(Segment((self.number + index) % 3, start, start + size))
            start += size
        return found

    def zero_share(self, shape: tuple[int, ...], kernel: str = "subtract") -> Words:
        """This party's summand of a random sharing of zero (of zero by XOR with the kernel ``xor``)."""
        machine = self.party.machine
        with_next, with_previous = (machine.masks(self, side, math.prod(shape)) for side in ("next", "previous"))
        return machine.binary(kernel, with_next, with_previous).reshape(shape)

    def uniform_below(self, stream: Stream, bound: int, shape: tuple[int, ...]) -> np.ndarray:
        """Values uniform in 0..bound−1 (uint8, no bias) that both holders of ``stream`` draw alike."""
        count = math.prod(shape)
        values = np.empty(count, dtype=np.uint8)
        if count:
            begin = stream.position
            found = kernels.uniform_below(stream.bytes(uniform_bytes(count, bound)), bound, values)
            if found < count:  # next to never; the stream goes on where it would have without
                fill_from_reserve(stream.reserve(begin), bound, values[found:])
        return values.reshape(shape)


def uniform_bytes(count: int, bound: int) -> int:
    """Random bytes to draw for ``count`` values below ``bound``, two at a time: six standard deviations and eight pairs
    more than it takes."""
    rejected, pairs = 65536 % bound**2 / 65536, (count + 1) // 2
    return 2 * (int((pairs + 6 * (pairs * rejected) ** 0.5) / (1 - rejected)) + 8)


def fill_from_reserve(reserve: Stream, bound: int, values: np.ndarray) -> None:
    """The values for which a draw's own bytes did not last."""
    found = 0
    while found < values.size:
        found += kernels.uniform_below(reserve.bytes(2 * (values.size - found) + 32), bound, values[found:])


class Party:
    """Party ``id`` (0, 1 or 2) of a run. Programs receive it as their first argument.

    ``id`` holds shares (x_id, x_id+1) of every secret. ``parameters`` are the public parameters that all parties
    compared before the run. ``run_id`` goes into every key of masks, ``step`` into every nonce; the pair keys
    themselves are fresh in every run, so that a resumed one, which has a run id of its own, never uses a mask again.
    """

    def __init__(
        self,
        id: int,
        transport: Transport,
        *,
        parameters: Mapping[str, Any] | None = None,
        run_id: bytes = b"",
        report: Callable[[Any], None] | None = None,
        insecure_seed: int | None = None,
        insecure_check_ranges: bool = False,
        insecure_record: bool = False,
    ):
        self.id = require_integer("party id", id, 0, 2)
        self.next = (id + 1) % 3
        self.previous = (id + 2) % 3
        self.transport = transport
        self.parameters = dict(parameters or {})
        self.run_id = run_id
        self.ledger = Ledger()
        self.machine = Machine(self)
        self._report = report
        self.insecure_check_ranges = insecure_check_ranges
        self.transcript: list[tuple[str, Peer, np.ndarray]] | None = [] if insecure_record else None
        self._seed = insecure_seed
        self._step = 0
        self._operations = 0
        self._arrivals = 0
        self._begun = 0
        self._repeated: dict[Any, Callable[..., Any]] = {}
        self._salt: int | None = None  # of the recorded step that runs: operations before it, its own code
        self._phase = "set-up"
        self._keys: dict[str, StreamKey] = {}
        self._own_key = os.urandom(KEY_BYTES) if insecure_seed is None else self._seeded(f"own {id}")
        self._used_nonces: set[tuple[str, bytes]] | None = set() if insecure_check_ranges else None
        self._agree_on_keys()
        self._phase = "main"

    def __repr__(self) -> str:
        return f"Party({self.id}, step={self._step}, operations={self._operations})"

    # randomness ----------------------------------------------------------------------------------

    def _seeded(self, label: str) -> bytes:
        material = f"insecure seed {self._seed} {label}".encode()
        return HKDF(hashes.SHA256(), KEY_BYTES, salt=None, info=b"").derive(material)

    def _agree_on_keys(self) -> None:
        """One round: each party draws a fresh key for itself and its next neighbour and sends it there."""
        fresh = os.urandom(KEY_BYTES) if self._seed is None else self._seeded(f"pair {self.id}")
        round_ = Round("key agreement")
        round_.send_next(np.frombuffer(fresh, dtype=np.uint8))
        received = round_.expect_previous(KEY_BYTES, np.uint8)
        self.deliver(round_)
        label = b"refmpc masks" + self.run_id
        for side, key in (("next", fresh), ("previous", received.tobytes())):
            self._keys[side] = StreamKey(HKDF(hashes.SHA256(), KEY_BYTES, salt=None, info=label).derive(key))
        if self.transcript is not None:
            self.transcript.clear()  # the record is of protocol messages, not of keys

    def mask_stream(self, side: str, number: int) -> Stream:
        """The stream shared with one neighbour for operation ``number`` of the present step."""
        nonce = self._step.to_bytes(4, "little") + number.to_bytes(4, "little")
        if self._used_nonces is not None:
            if (side, nonce) in self._used_nonces:
                raise AssertionError(f"mask stream {side!r} of step {self._step}, operation {number} was used before")
            self._used_nonces.add((side, nonce))
        return Stream(self._keys[side], nonce)

    def private_stream(self, purpose: str, number: int = 0) -> Stream:
        """A stream that only this party knows, for a named purpose."""
        self.machine.leave(f"a private stream ({purpose})")
        info = f"refmpc private {purpose}".encode() + self.run_id
        key = HKDF(hashes.SHA256(), KEY_BYTES, salt=None, info=info).derive(self._own_key)
        return Stream(key, number.to_bytes(8, "little"))

    @property
    def step(self) -> int:
        """The step of the running protocol; part of every nonce."""
        self.machine.leave("reading the number of the step")
        return self._step

    @step.setter
    def step(self, value: int) -> None:
        self._step = require_integer("step", value, 0, 2**32 - 1)

    def operation(self, name: str, *public: Any) -> Operation:
        """Begin a primitive: a fresh number, hence fresh randomness. All parties begin the same ones in order.

        ``public`` are its operands and all its public arguments: parties that differ in them raise ``OutOfStep``. Check
        this party's own arguments before: a number that was taken cannot be given back.
        """
        self._operations += 1
        return Operation(self, name, self._operations, mix(name_digest(name), *map(digest, public)))

    def arrival(self) -> int:
        """The history of a secret that no operation of ours made: its place in the order of arrival."""
        self.machine.leave("a tensor made of an array from outside")
        self._arrivals += 1
        return mix(_ARRIVAL, self._arrivals)

    @property
    def code_base(self) -> int:
        """What all operations add to their codes: the step; in a recorded step what its inputs are (``_salt``)."""
        return self._step * _PER_STEP if self._salt is None else self._salt

    def counted(self, number: int) -> int:
        """An operation's number as codes and histories know it: in a recorded step counted from its beginning."""
        return number - self._begun

    # recorded steps ------------------------------------------------------------------------------

    def recorded(self, function: Callable[..., Coroutine[Round, None, Any]]) -> Callable[..., Any]:
        """``function`` (async, of secrets) as one whose calls are recorded and repeated: ``refmpc.core.program``."""
        from refmpc.core.program import Recorded

        return Recorded(self, function)

    def repeated(self, function: Callable[..., Coroutine[Round, None, Any]]) -> Callable[..., Any]:
        """``function`` of this party and secrets, recorded once for all its callers: for a part of a primitive."""
        if function not in self._repeated:
            self._repeated[function] = self.recorded(functools.partial(function, self))
        return self._repeated[function]

    @contextlib.contextmanager
    def inside_recorded(self, inputs: int) -> Iterator[int]:
        """Codes and histories count from here on; yields what they all grow by: step, first operation, ``inputs``.

        Numbers are left out up to a multiple of three, so that the rotation of dealers begins at the same place in
        every call, and one program serves all."""
        self._operations += -self._operations % 3
        salt = mix(self._step, self._operations, inputs)
        self._begun, self._salt = self._operations, (salt >> 20) & 0xFFFFFFFF
        try:
            yield salt
        finally:
            self._begun, self._salt = 0, None

    @property
    def is_inside_recorded(self) -> bool:
        """Whether a recorded function runs."""
        return self._salt is not None

    @property
    def operations(self) -> int:
        """How many operations have begun."""
        return self._operations

    def claim(self, draws: Draws, operations: int) -> None:
        """Take the numbers of a program's operations, and draw their masks."""
        self._operations += operations
        draws.draw(self._keys, self._step, self._begun)

    def claimed_stream(self, side: str, number: int) -> Stream:
        """The stream of one of a program's operations."""
        return self.mask_stream(side, self._begun + number)

    def speak(self, exchange: Callable[[int], None], code: int, weight: int, numbers: Sequence[int]) -> None:
        """A round of a program: ``exchange`` it under its code."""
        try:
            exchange((code + weight * self.code_base) & 0xFFFFFFFF)
        except OutOfStep as error:
            raise self._located(error, [self._begun + number for number in numbers]) from None

    @contextlib.contextmanager
    def counting(self, rounds: int) -> Iterator[None]:
        """Add what is sent inside, and as many rounds, to the counters of the phase."""
        counters = self.ledger.phases.setdefault(self._phase, Counters())
        transport = self.transport
        before = transport.bytes_sent, transport.frames_sent, transport.seconds_waiting
        yield
        counters.rounds += rounds
        counters.bytes_sent += transport.bytes_sent - before[0]
        counters.frames_sent += transport.frames_sent - before[1]
        counters.seconds_waiting += transport.seconds_waiting - before[2]

    # communication -------------------------------------------------------------------------------

    def deliver(self, round_: Round) -> None:
        """Carry out one round with both neighbours."""
        sends = self._links(round_.to_next, round_.to_previous)
        receives = self._links(round_.from_next, round_.from_previous)
        try:
            self._exchange(round_.operation, sends, receives, round_.code)
        except OutOfStep as error:
            raise self._located(error, round_.numbers) from None
        self.machine.delivered(round_, sends, receives)

    def _links(self, with_next: list[np.ndarray], with_previous: list[np.ndarray]) -> dict[Peer, list[np.ndarray]]:
        """The messages of a round by neighbour, without those that are empty."""
        links = (self.next, with_next), (self.previous, with_previous)
        return {peer: parts for peer, parts in links if any(part.nbytes for part in parts)}

    def _located(self, error: OutOfStep, numbers: Sequence[int]) -> OutOfStep:
        return OutOfStep(f"{error}; here this is step {self._step}, operation {' + '.join(map(str, numbers))}")

    def send(self, operation: str, receiver: Peer, parts: list[np.ndarray]) -> None:
        """Send one message to any peer (a client, or a server outside the ring pattern)."""
        self.machine.leave(f"a message to {receiver!r}")
        self._exchange(operation, {receiver: [np.ascontiguousarray(part) for part in parts]}, {})

    def receive(self, operation: str, sender: Peer, parts: list[np.ndarray]) -> None:
        """Receive one message from any peer into ``parts``."""
        self.machine.leave(f"a message from {sender!r}")
        self._exchange(operation, {}, {sender: parts})

    def _exchange(self, operation: str, sends: dict[Peer, Any], receives: dict[Peer, Any], code: int = 0) -> None:
        with self.counting(rounds=1):
            self.transport.exchange(operation, sends, receives, code)
        if self.transcript is not None:
            for peer, parts in receives.items():
                self.transcript += [(operation, peer, part.copy()) for part in parts]

    def complete(self, protocol: Coroutine[Round, None, Any]) -> Any:
        """Run an async protocol to its end and return its result."""
        return complete(protocol, self.deliver)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count rounds, bytes and time under ``name`` while inside."""
        outer, self._phase = self._phase, name
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._phase = outer
            self.ledger.phases.setdefault(name, Counters()).seconds += time.perf_counter() - begun

    def report(self, message: Any) -> None:
        """Tell the caller of the run something public, such as progress. Never a value that depends on secrets."""
        if self._report is not None:
            self._report(message)

    def declare(self, releases: Mapping[str, str]) -> None:
        """Declare what this program may open, each with the claim that covers it."""
        self.ledger.declare(releases)
