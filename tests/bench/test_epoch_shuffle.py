"""The benchmark of an epoch's shuffle, at a size that takes a moment."""

import pytest

from bench.epoch_shuffle import measure


@pytest.mark.parametrize("files", [False, True])
def test_the_shuffle_of_an_epoch_costs_what_the_primitive_declares(files):
    found = measure(rows=60, columns=5, classes=3, files=files)
    assert found.rounds == 2
    assert found.bytes == 32 * 60 * (5 + 1 + 3 + 1)
    assert found.share_of_the_data == 16 * 60 * (5 + 1 + 3 + 1)
    assert found.peak_memory > found.share_of_the_data


@pytest.mark.heavy
def test_a_shuffle_in_files_needs_a_few_chunks_of_memory():
    """100,000 × 400: 0.66 GB of shares at each server. In memory there is one extra copy and some chunks of 32 MB; in
    files chunks."""
    memory, files = (measure(rows=100_000, columns=400, classes=10, files=files) for files in (False, True))
    assert files.bytes == memory.bytes and files.rounds == memory.rounds > 2
    started = 250e6  # of a process that has done nothing yet
    assert memory.peak_memory < 2 * memory.share_of_the_data + started + 12 * 32e6
    assert files.peak_memory < started + 16 * 32e6 < 1.2 * files.share_of_the_data + started
