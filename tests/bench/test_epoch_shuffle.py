"""The benchmark of an epoch's shuffle, at a size that takes a moment."""

from bench.epoch_shuffle import measure


def test_the_shuffle_of_an_epoch_costs_what_the_primitive_declares():
    found = measure(rows=60, columns=5, classes=3)
    assert found.rounds == 2
    assert found.bytes == 32 * 60 * (5 + 1 + 3 + 1)
    assert found.share_of_the_data == 16 * 60 * (5 + 1 + 3 + 1)
    assert found.peak_memory > found.share_of_the_data
