"""Three-party secure computation by replicated secret sharing over Z_2^64, semi-honest, one corrupted party.

import refmpc

async def program(party, own):
    x = await refmpc.input_from_party(party, 0, own, shape=(3,))
    return await refmpc.reveal(x * x, release="squares")

refmpc.run(program, [[1.0, 2.0, 3.0], None, None], releases={"squares": "an example, no claim"}).outputs
"""

from refmpc.core.errors import (
    HandshakeError,
    NotRecordable,
    OutOfStep,
    PartyFailed,
    PeerAborted,
    PeerLost,
    PeerTimeout,
    RangeError,
    RefmpcError,
    ReleaseRefused,
    SharesDiffer,
)
from refmpc.core.fixed import DEFAULT_FRACTION_BITS, decode, encode, largest_value
from refmpc.core.ledger import Ledger, Release
from refmpc.core.party import Party
from refmpc.core.primitive import PROTOCOLS, Cost
from refmpc.core.rounds import gather
from refmpc.core.tensor import ArithmeticTensor, BooleanTensor, concatenate, stack
from refmpc.core.words import Words, seal, unseal
from refmpc.launch.dry_run import dry_run
from refmpc.launch.runtime import RunResult, run
from refmpc.mathematics.clipping import clip_root
from refmpc.mathematics.exp_below import exp_below
from refmpc.mathematics.exponential import exp, log, softmax
from refmpc.mathematics.gaussian import gaussian_addend, joint_gaussian, joint_slope_error
from refmpc.mathematics.kept_products import open_kept, open_product, series_together
from refmpc.mathematics.octave import octave
from refmpc.mathematics.polynomial import polynomial
from refmpc.mathematics.powers import weigh_reached
from refmpc.mathematics.probabilities import probabilities
from refmpc.mathematics.reciprocal import divide, reciprocal, reciprocal_narrow
from refmpc.mathematics.roots import clip_factor, inverse_sqrt, sqrt
from refmpc.mathematics.scale_rows import cut_and_square, scale_rows
from refmpc.mathematics.series import Kept, Series, half_wave, open_squares, series, series_times
from refmpc.mathematics.smooth import SMOOTH, smooth
from refmpc.mathematics.spline import spline_times
from refmpc.net.emulation import NetworkProfile
from refmpc.primitives.arithmetic import (
    dot,
    dot_truncate,
    matmul,
    matmul_public,
    matmul_public_held,
    matmul_truncate,
    multiply,
    multiply_truncate,
)
from refmpc.primitives.boolean import (
    and_words,
    arithmetic_to_boolean,
    boolean_to_arithmetic,
    equal,
    is_negative_by_carry_tree,
)
from refmpc.primitives.comparison import is_negative, maximum, relu, thermometer
from refmpc.primitives.dealing import Additive, Lifted, TwoHolder, replicate, summands, truncate_additive
from refmpc.primitives.gates import gated
from refmpc.primitives.io import Client, input_from_client, input_from_party, reveal, reveal_to_client
from refmpc.primitives.opening import (
    matmul_opening,
    open_to_client,
    open_words,
    opening_bytes,
    receive_opening,
    tensor_opening,
)
from refmpc.primitives.order import largest_coarse
from refmpc.primitives.shuffle import column_chunks, shuffle, shuffle_in_place
from refmpc.primitives.truncation import truncate
from refmpc.primitives.two_holder import (
    TwoHolderBits,
    bit_to_arithmetic,
    bits_to_boolean,
    lookup,
    select,
    two_holder,
    weigh_bits,
    where,
)

__all__ = [
    "DEFAULT_FRACTION_BITS",
    "PROTOCOLS",
    "SMOOTH",
    "Additive",
    "ArithmeticTensor",
    "BooleanTensor",
    "Client",
    "Cost",
    "HandshakeError",
    "Kept",
    "Ledger",
    "Lifted",
    "NetworkProfile",
    "NotRecordable",
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
    "Series",
    "SharesDiffer",
    "TwoHolder",
    "TwoHolderBits",
    "Words",
    "and_words",
    "arithmetic_to_boolean",
    "bit_to_arithmetic",
    "bits_to_boolean",
    "boolean_to_arithmetic",
    "clip_factor",
    "clip_root",
    "column_chunks",
    "concatenate",
    "cut_and_square",
    "decode",
    "divide",
    "dot",
    "dot_truncate",
    "dry_run",
    "encode",
    "equal",
    "exp",
    "exp_below",
    "gated",
    "gather",
    "gaussian_addend",
    "half_wave",
    "input_from_client",
    "input_from_party",
    "inverse_sqrt",
    "is_negative",
    "is_negative_by_carry_tree",
    "joint_gaussian",
    "joint_slope_error",
    "largest_coarse",
    "largest_value",
    "log",
    "lookup",
    "matmul",
    "matmul_opening",
    "matmul_public",
    "matmul_public_held",
    "matmul_truncate",
    "maximum",
    "multiply",
    "multiply_truncate",
    "octave",
    "open_kept",
    "open_product",
    "open_squares",
    "open_to_client",
    "open_words",
    "opening_bytes",
    "polynomial",
    "probabilities",
    "receive_opening",
    "reciprocal",
    "reciprocal_narrow",
    "relu",
    "replicate",
    "reveal",
    "reveal_to_client",
    "run",
    "scale_rows",
    "seal",
    "select",
    "series",
    "series_times",
    "series_together",
    "shuffle",
    "shuffle_in_place",
    "smooth",
    "softmax",
    "spline_times",
    "sqrt",
    "stack",
    "summands",
    "tensor_opening",
    "thermometer",
    "truncate",
    "truncate_additive",
    "two_holder",
    "unseal",
    "weigh_bits",
    "weigh_reached",
    "where",
]
