"""Two new primitives: one with messages of its own, one made of others."""

from __future__ import annotations

import numpy as np

import refmpc
from refmpc import ArithmeticTensor, Cost
from refmpc.core.primitive import primitive


# --8<-- [start:square]
@primitive(cost=lambda x: Cost(1, 24 * x.size), source="Araki et al. 2016, with both factors equal")
async def square(x: ArithmeticTensor) -> ArithmeticTensor:
    """x² element by element; the scale doubles.

    1 round, 24 bytes an element. Exact modulo 2^64, so |x| < 2^31 in the ring for a result that means x².
    Views: each server receives one word, z_i plus a zero share. The zero share holds a stream that the receiver
    does not know, so the word is uniform whatever x is.
    """
    operation = x.party.operation("square", x)  # a fresh number: fresh masks; its operands: a digest in each frame
    machine = operation.machine
    # (x0 + x1 + x2)² = Σ_i (x_i² + 2·x_i·x_i+1), and server i holds x_i and x_i+1: the kernel of a product does it
    shares = machine.memory((2, *x.shape))
    machine.call("product_pair", x.shares, x.shares, operation.zero_share(x.shape), shares[0])
    round_ = operation.round()
    round_.send_previous(shares[0])
    theirs = round_.expect_next(x.shape)
    await round_
    machine.call("copy", theirs, shares[1])
    return ArithmeticTensor(x.party, shares, 2 * x.fraction_bits, operation.history())


# --8<-- [end:square]


# --8<-- [start:absolute]
def _absolute_cost(x: ArithmeticTensor, high_bit: int = 63) -> Cost:
    return refmpc.is_negative.cost(x, 0, high_bit) + Cost(2, 32 * x.size)  # 32: what select declares


@primitive(cost=_absolute_cost, source="is_negative, select")
async def absolute(x: ArithmeticTensor, high_bit: int = 63) -> ArithmeticTensor:
    """|x|. 4 rounds, the bytes of ``is_negative`` and 32. Exact for |x| < 2^high_bit in the ring.

    Views: those of its two parts, one after the other; nothing is opened in between.
    """
    negative = await refmpc.is_negative(x, 0, high_bit)
    return x - await refmpc.select(negative, x + x)


# --8<-- [end:absolute]


# --8<-- [start:check]
VALUES = np.array([-1.5, -0.25, 0.0, 0.25, 3.0])


async def program(party: refmpc.Party, own: np.ndarray | None) -> tuple:
    x = await refmpc.input_from_party(party, 0, own, shape=VALUES.shape)
    with party.phase("square"):
        squares = await square(x)
    with party.phase("absolute"):
        sizes = await absolute(x, high_bit=20)
    declared = {"square": square.cost(x), "absolute": absolute.cost(x, high_bit=20)}
    return await refmpc.reveal(squares, "squares"), await refmpc.reveal(sizes, "sizes"), declared


def main() -> None:
    reason = "an example, no claim"
    result = refmpc.run(program, [VALUES, None, None], releases={"squares": reason, "sizes": reason})
    for squares, sizes, _ in result.outputs:
        assert np.array_equal(squares, VALUES**2), squares
        assert np.array_equal(sizes, np.abs(VALUES)), sizes
    for name, cost in result.outputs[0][2].items():
        phases = [ledger.phases[name] for ledger in result.ledgers]
        counted = Cost(max(phase.rounds for phase in phases), sum(phase.bytes_sent for phase in phases))
        assert counted == cost, f"{name}: declared {cost}, the transport counted {counted}"
        print(f"{name}: {counted.rounds} rounds, {counted.bytes} bytes, as declared")


if __name__ == "__main__":
    main()
# --8<-- [end:check]
