"""When two participants' public parameters agree: exactly, or not at all."""

from __future__ import annotations

import math

import pytest

from refmpc.net.greeting import first_difference, must_agree


def test_equal_parameters_agree_however_they_are_ordered_or_held():
    mine = {"bounds": (0.1, 1e-300), "counts": {10: 1, 9: 2}, "name": "é"}
    assert first_difference({"name": "é", "counts": {"9": 2, "10": 1}, "bounds": [0.1, 1e-300]}, mine) is None


@pytest.mark.parametrize(
    ("theirs", "mine"),
    [(0.1, math.nextafter(0.1, 1)), (1, 1.0), ([0.5, 2], [0.5]), (True, 1), (None, 0)],
    ids=["last bit", "kind of number", "length", "truth", "nothing"],
)
def test_the_slightest_difference_is_named(theirs, mine):
    different = first_difference({"same": 1, "sigma": theirs}, {"same": 1, "sigma": mine})
    assert different is not None and different[0] == "sigma"


def test_what_one_side_does_not_know_is_named():
    assert first_difference({}, {"epsilon": 1.0}) == ("epsilon", "missing", "1.0")


@pytest.mark.parametrize(
    ("got", "want", "by_rounding"),
    [
        ("3.7000000000000006", "3.7", True),
        ('"Scales(bound=2.536163327845594, bits=12)"', '"Scales(bound=2.536163327845595, bits=12)"', True),
        ('"Scales(bound=2.536163327845594, bits=12)"', '"Scales(bound=2.536163327845595, bits=13)"', False),
        ("1.3643382620756376e-30", "1.3643382620756372e-30", True),
        ("0.5", "0.50001", False),
        ("1000000000", "1000000001", False),  # integers are somebody's choice
        ("1.0", "missing", False),
    ],
)
def test_who_merely_rounds_differently_is_told_so(got, want, by_rounding):
    assert ("processors" in must_agree(got, want)) == by_rounding == (must_agree(got, want) != "they must agree")
