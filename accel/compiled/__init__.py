"""The kernels in numba: the same names and results as ``accel.reference``."""

from accel.compiled.bits import (
    and_pair,
    carry_layer,
    pack_bits,
    pack_small,
    packed_size,
    slice_bits,
    unpack_bits,
    unpack_small,
    unslice_bits,
)
from accel.compiled.holders import (
    compare_deal,
    compare_decide,
    compare_reply,
    comparison_digits,
    truncate_deal,
    truncate_finish,
    truncate_reply,
    uniform_below,
)
from accel.compiled.noise import fir_taps, grid_gaussian_attempts, recursive_filter
from accel.compiled.ring import (
    decode_fixed,
    encode_fixed,
    gather_rows,
    matmul_pair,
    product_pair,
    shift_right_arithmetic,
    shift_right_logical,
)

__all__ = [
    "and_pair",
    "carry_layer",
    "compare_deal",
    "compare_decide",
    "compare_reply",
    "comparison_digits",
    "decode_fixed",
    "encode_fixed",
    "fir_taps",
    "gather_rows",
    "grid_gaussian_attempts",
    "matmul_pair",
    "pack_bits",
    "pack_small",
    "packed_size",
    "product_pair",
    "recursive_filter",
    "shift_right_arithmetic",
    "shift_right_logical",
    "slice_bits",
    "truncate_deal",
    "truncate_finish",
    "truncate_reply",
    "uniform_below",
    "unpack_bits",
    "unpack_small",
    "unslice_bits",
]
