"""The public names of ``refmpc``: a name that goes, or comes, is a decision and not an accident of a move."""

import refmpc

NAMES = """
    DEFAULT_FRACTION_BITS PROTOCOLS SMOOTH Additive ArithmeticTensor BooleanTensor Client Cost HandshakeError Kept
    Ledger Lifted NetworkProfile NotRecordable OutOfStep Party PartyFailed PeerAborted PeerLost PeerTimeout
    RangeError RefmpcError Release ReleaseRefused RunResult Series SharesDiffer TwoHolder TwoHolderBits Words and_words
    arithmetic_to_boolean bit_to_arithmetic bits_to_boolean boolean_to_arithmetic clip_factor clip_root
    column_chunks concatenate cut_and_square decode divide dot dot_truncate dry_run encode equal exp exp_below gated
    gather gaussian_addend half_wave input_from_client input_from_party inverse_sqrt is_negative
    is_negative_by_carry_tree joint_gaussian joint_slope_error largest_coarse largest_value log lookup matmul
    matmul_opening matmul_public matmul_public_held matmul_truncate maximum multiply multiply_truncate octave
    open_kept open_product
    open_squares open_to_client open_words opening_bytes polynomial probabilities receive_opening reciprocal
    reciprocal_narrow relu replicate reveal reveal_to_client run scale_rows seal select series series_times
    series_together shuffle
    shuffle_in_place smooth softmax spline_times sqrt stack summands tensor_opening thermometer truncate
    truncate_additive two_holder unseal weigh_bits weigh_reached where
"""


def test_the_public_names_are_these():
    assert sorted(refmpc.__all__) == sorted(NAMES.split())


def test_every_public_name_is_there_and_no_room_hides_one():
    """A room called like a function (``run``) would be found in its place, or hide it."""
    for name in refmpc.__all__:
        value = getattr(refmpc, name)
        assert type(value).__name__ != "module", name
