"""Participants of a deployment compare public parameters by the same exact rule as those of a local run."""

from __future__ import annotations

import math
from typing import Any, cast

from protocols.net.wire import Identity


def test_a_last_bit_is_a_difference_and_the_sentence_names_both():
    server = Identity(config=cast(Any, None), me=0, credentials=cast(Any, None))
    sigma = 3.7
    assert server.difference(1, {"sigma": sigma, "rows": [1, 2]}, {"sigma": sigma, "rows": (1, 2)}) == ""
    other = math.nextafter(sigma, 4)
    sentence = server.difference(1, {"sigma": other}, {"sigma": sigma})
    assert sentence.startswith(
        f"server-1 has sigma = {other!r}, server-0 has {sigma!r}: they differ in the last digits only"
    )
    assert server.difference(1, {"sigma": 3.8}, {"sigma": sigma}).endswith(": they must agree")
