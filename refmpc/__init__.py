"""Three-party secure computation by replicated secret sharing over Z_2^64, semi-honest, one corrupted party.

import refmpc

async def program(party, own):
    x = await refmpc.input_from_party(party, 0, own, shape=(3,))
    return await refmpc.reveal(x * x, release="squares")

refmpc.run(program, [[1.0, 2.0, 3.0], None, None], releases={"squares": "an example, no claim"}).outputs
"""

from refmpc.arithmetic import dot, dot_truncate, matmul, matmul_truncate, multiply, multiply_truncate
from refmpc.circuits import (
    and_words,
    arithmetic_to_boolean,
    boolean_to_arithmetic,
    equal,
    is_negative_by_carry_tree,
)
from refmpc.comparison import is_negative, maximum, relu
from refmpc.errors import (
    HandshakeError,
    OutOfStep,
    PartyFailed,
    PeerAborted,
    PeerLost,
    PeerTimeout,
    RangeError,
    RefmpcError,
    ReleaseRefused,
)
from refmpc.fixed import DEFAULT_FRACTION_BITS, decode, encode, largest_value
from refmpc.holders import TwoHolderBits, bit_to_arithmetic, bits_to_boolean, lookup, select, two_holder, where
from refmpc.io import Client, input_from_client, input_from_party, reveal, reveal_to_client
from refmpc.ledger import Ledger, Release
from refmpc.network import NetworkProfile
from refmpc.party import Party
from refmpc.protocol import PROTOCOLS, Cost
from refmpc.rounds import gather
from refmpc.runtime import RunResult, run
from refmpc.tensor import ArithmeticTensor, BooleanTensor, concatenate, stack
from refmpc.truncation import truncate

__all__ = [
    "DEFAULT_FRACTION_BITS",
    "PROTOCOLS",
    "ArithmeticTensor",
    "BooleanTensor",
    "Client",
    "Cost",
    "HandshakeError",
    "Ledger",
    "NetworkProfile",
    "OutOfStep",
    "Party",
    "PartyFailed",
    "PeerAborted",
    "PeerLost",
    "PeerTimeout",
    "RangeError",
    "RefmpcError",
    "Release",
    "ReleaseRefused",
    "RunResult",
    "TwoHolderBits",
    "and_words",
    "arithmetic_to_boolean",
    "bit_to_arithmetic",
    "bits_to_boolean",
    "boolean_to_arithmetic",
    "concatenate",
    "decode",
    "dot",
    "dot_truncate",
    "encode",
    "equal",
    "gather",
    "input_from_client",
    "input_from_party",
    "is_negative",
    "is_negative_by_carry_tree",
    "largest_value",
    "lookup",
    "matmul",
    "matmul_truncate",
    "maximum",
    "multiply",
    "multiply_truncate",
    "relu",
    "reveal",
    "reveal_to_client",
    "run",
    "select",
    "stack",
    "truncate",
    "two_holder",
    "where",
]
