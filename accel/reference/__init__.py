"""The kernels in plain numpy: short and obviously right."""

from accel.reference.bits import (
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
from accel.reference.holders import (
    compare_deal,
    compare_decide,
    compare_reply,
    comparison_digits,
    truncate_deal,
    truncate_finish,
    truncate_reply,
    uniform_below,
)
from accel.reference.noise import fir_taps, grid_gaussian_attempts, recursive_filter
from accel.reference.ring import (
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
