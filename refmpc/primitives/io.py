"""How secrets come in and how they may leave.

In: from a client outside (two of its three shares are seeds, one is a correction: 16 bytes a value in all), or from one
of the servers (8 bytes). Out: only through the ledger, to all servers, or to one client or server.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from accel.prg import KEY_BYTES, Stream
from accel.validate import require, require_integer
from refmpc.core.errors import SharesDiffer
from refmpc.core.fixed import DEFAULT_FRACTION_BITS, decode, encode
from refmpc.core.party import Operation, Party
from refmpc.core.primitive import Cost, primitive
from refmpc.core.tensor import ArithmeticTensor, BooleanTensor, SecretTensor
from refmpc.core.words import Words, seal, unseal
from refmpc.net.framing import Peer, Transport, listed, name_of, title

__all__ = ["SHARE_DIGEST_BYTES", "Client", "input_from_client", "input_from_party", "reveal", "reveal_to_client"]

SHARE_DIGEST_BYTES = hashlib.sha256().digest_size  # beside the words of a result, from each server
SOURCE_INPUT = "PRG-compressed input: Araki et al. 2016 with two shares as seeds"


def _input_cost(party: Party, source: int, values: Any, shape: tuple[int, ...], fraction_bits: int = 0) -> Cost:
    return Cost(1, 8 * int(np.prod(shape)))


@primitive(cost=_input_cost, source=SOURCE_INPUT)
async def input_from_party(
    party: Party, source: int, values: Any, shape: tuple[int, ...], fraction_bits: int = DEFAULT_FRACTION_BITS
) -> ArithmeticTensor:
    """Party ``source`` shares ``values`` (None at the others). 1 round, 8 bytes.

    The share it has with its previous neighbour is a mask from their stream, the one with its next neighbour is what
    remains, the third is zero.
    """
    require_integer("source", source, 0, 2)
    words = None
    if party.id == source:  # refused values must not leave this party one operation ahead
        words = encode(values, fraction_bits, name="values")
        require(words.shape == tuple(shape), "values.shape", words.shape, f"the declared shape {tuple(shape)}")
    operation = party.operation("input_from_party", source, tuple(shape), fraction_bits)
    count = int(np.prod(shape))
    machine = operation.machine
    machine.leave("an input")
    shares = machine.memory((2, count))
    round_ = operation.round()
    if words is not None:
        machine.call("copy", machine.masks(operation, "previous", count), shares[0])
        machine.call("subtract", seal(words).reshape(-1), shares[0], shares[1])
        round_.send_next(shares[1])
    else:
        own, other = (shares[1], shares[0]) if party.next == source else (shares[0], shares[1])
        machine.call("copy", np.uint64(0), other)
        if party.next == source:
            machine.call("copy", machine.masks(operation, "next", count), own)
        else:
            round_.fill_previous(own)
    await round_
    return ArithmeticTensor(party, shares.reshape(2, *shape), fraction_bits, operation.history())


# clients outside --------------------------------------------------------------------------------


class Client:
    """A client's end of its channels to the three servers: it shares values and receives results.

    ``share`` sends 16 bytes a value in all: shares x_0 and x_1 are streams from fresh seeds, x_2 is the correction,
    which goes to the two servers that hold it.
    """

    def __init__(self, name: str, transport: Transport):
        self.name = name
        self.transport = transport

    def share(self, values: Any, fraction_bits: int = DEFAULT_FRACTION_BITS) -> None:
        """Share an array with the servers, which call ``input_from_client`` with the same shape and scale."""
        words = encode(values, fraction_bits, name="values").reshape(-1)
        seeds = [Stream.random_key() for _ in range(2)]
        correction = words - Stream(seeds[0]).words(words.size) - Stream(seeds[1]).words(words.size)
        zero, one = (np.frombuffer(seed, dtype=np.uint8) for seed in seeds)
        self._send({0: [zero, one], 1: [one, correction], 2: [correction, zero]}, "input_from_client")

    def receive(
        self, shape: tuple[int, ...], fraction_bits: int = DEFAULT_FRACTION_BITS, timeout: float | None = None
    ) -> np.ndarray:
        """Receive a result that the servers reveal to this client. ``timeout`` replaces the run's: a result may take
        as long as the training does, and a server that dies is noticed at once anyway.

        Every share is known to two servers. If one of them has sent other words than the other vouches for, its memory
        or disk is damaged or it deviates: ``SharesDiffer`` names both.
        """
        parts = [np.empty(shape, dtype=np.uint64) for _ in range(3)]
        vouched = [np.empty(SHARE_DIGEST_BYTES, dtype=np.uint8) for _ in range(3)]
        receives: dict[Peer, list[np.ndarray]] = {server: [parts[server], vouched[server]] for server in range(3)}
        self.collect("reveal_to_client", receives, timeout)
        wrong = [i for i in range(3) if vouched[i].tobytes() != _share_digest(parts[(i + 1) % 3])]
        if wrong:
            pairs = listed(f"{name_of(i)} and {name_of((i + 1) % 3)}" for i in wrong)
            raise SharesDiffer(
                f"{pairs} sent {self.name!r} different words of a share that both hold: a server has computed or "
                f"stored "
                "something wrongly (memory, disk, mixed versions) or deviates. The result is not used; look at these "
                "hosts"
            )
        return decode(parts[0] + parts[1] + parts[2], fraction_bits)

    def collect(self, operation: str, receives: Mapping[Peer, list[np.ndarray]], timeout: float | None = None) -> None:
        """Receive one message of each named server into its arrays."""
        usual = self.transport.timeout
        self.transport.timeout = usual if timeout is None else timeout
        try:
            self.transport.exchange(operation, {}, receives)
        finally:
            self.transport.timeout = usual

    def _send(self, messages: Mapping[Peer, list[np.ndarray]], operation: str) -> None:
        self.transport.exchange(operation, messages, {})


def input_from_client(
    party: Party, client: str, shape: tuple[int, ...], fraction_bits: int = DEFAULT_FRACTION_BITS
) -> ArithmeticTensor:
    """Take in what ``client`` shares: 16 bytes a value in all, sent by the client; servers send nothing."""
    count = int(np.prod(shape))
    correction = np.empty(count, dtype=np.uint64)
    layout: list[np.ndarray] = [
        np.empty(KEY_BYTES, dtype=np.uint8) for _ in range(2)
    ]  # party 0 holds the two seeded shares
    if party.id != 0:
        layout[2 - party.id] = correction
    party.receive("input_from_client", client, layout)
    shares = [part if part is correction else Stream(part.tobytes()).words(count) for part in layout]
    return ArithmeticTensor(party, np.stack(shares).reshape(2, *shape), fraction_bits)


def reveal_to_client(x: ArithmeticTensor, client: str, release: str) -> None:
    """Open x (arithmetic) to one client only. Each server sends its first share, 24 bytes a value in all, and a digest
    of its second one, by which the client compares the two holders of every share.

    One corrupted server sees nothing: servers receive no message. Together with the client it sees what it sees alone,
    and x: the third share is x minus its own two.
    """
    party = x.party
    require(isinstance(x, ArithmeticTensor), "x", x, "an arithmetic tensor", "convert it with boolean_to_arithmetic")
    party.machine.leave(f"the release {release!r}")
    party.ledger.record(release, x.size, title(client))
    digest = np.frombuffer(_share_digest(unseal(x.second)), dtype=np.uint8)
    party.send("reveal_to_client", client, [unseal(x.first), digest])


def _share_digest(words: np.ndarray) -> bytes:
    return hashlib.sha256(np.ascontiguousarray(words).data).digest()


# releases ---------------------------------------------------------------------------------------


def _reveal_cost(x: SecretTensor, release: str, to: int | None = None) -> Cost:
    return Cost(1, (24 if to is None else 8) * x.size)


@primitive(cost=_reveal_cost, source="Araki et al. 2016")
async def reveal(x: SecretTensor, release: str, to: int | None = None) -> np.ndarray | None:
    """Open x to all servers, or to server ``to`` alone (the others get None). 1 round, 24 bytes or 8.

    ``release`` must have been declared together with its claim; the ledger records it before anything is sent.
    """
    party = x.party
    if to is not None:
        require_integer("to", to, 0, 2)
    party.machine.leave(f"the release {release!r}")
    party.ledger.record(release, x.size, "all servers" if to is None else title(to))
    operation = party.operation("reveal", x, release, to)
    missing = await _missing_share(operation, x, to)
    if missing is None:
        return None
    first, second, third = map(unseal, (x.first, x.second, missing))
    if isinstance(x, BooleanTensor):
        return first ^ second ^ third
    assert isinstance(x, ArithmeticTensor)
    return decode(first + second + third, x.fraction_bits)


async def _missing_share(operation: Operation, x: SecretTensor, to: int | None) -> Words | None:
    party = x.party
    round_ = operation.round()
    missing = None
    if to is None or party.next == to:
        round_.send_next(operation.machine.contiguous(x.first))
    if to is None or party.id == to:
        missing = round_.expect_previous(x.shape)
    await round_
    return missing
