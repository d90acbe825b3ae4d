"""The seal: what depends on secrets can be cut, reshaped and handed on, and nothing else."""

import copy
import pickle
from typing import Any

import numpy as np
import pytest

import refmpc
from refmpc import Words, seal, unseal
from refmpc.core.machine import Machine
from tests.refmpc.harness import Secret, evaluate

REFUSED = {
    "a sum": lambda w: w + 1,
    "a sum from the left": lambda w: np.ones(4, np.uint64) + w,
    "a sum in place": lambda w: w.__iadd__(1),
    "a comparison": lambda w: w == w,
    "an order": lambda w: w < 3,
    "a truth value": lambda w: bool(w[0, 0]),
    "an integer": lambda w: int(w[0, 0]),
    "an index": lambda w: list(range(5))[w[0, 0]],
    "a float": lambda w: float(w[0, 0]),
    "item": lambda w: w.item(0),
    "tolist": lambda w: w.tolist(),
    "print": lambda w: str(w),
    "a format": lambda w: f"{w}",
    "a sum of all": lambda w: w.sum(),
    "numpy's sum": lambda w: np.sum(w),
    "a maximum": lambda w: w.max(),
    "a copy": lambda w: w.copy(),
    "Python's copy": lambda w: copy.copy(w),
    "a deep copy": lambda w: copy.deepcopy(w),
    "a pickle": lambda w: pickle.dumps(w),
    "another type": lambda w: w.astype(np.int64),
    "floats": lambda w: w.view(np.float64),
    "bytes": lambda w: w.tobytes(),
    "a flat copy": lambda w: w.flatten(),
    "the flat iterator": lambda w: w.flat,
    "a list as an index": lambda w: w[[0, 1]],
    "a mask as an index": lambda w: w[np.array([True, False, True])],
    "an assignment": lambda w: w.__setitem__(0, 1),
    "a reshape that copies": lambda w: w.T.reshape(-1),
    "a concatenation": lambda w: np.concatenate([w, w]),
    "a choice": lambda w: np.where(w, 1, 2),
    "membership": lambda w: 3 in w,
    "sorting": lambda w: sorted(w),
    "public use": lambda w: refmpc.encode(w),
}


@pytest.mark.parametrize("what", REFUSED)
def test_nothing_can_be_computed_or_read_from_a_sealed_array(what):
    words = seal(np.arange(12, dtype=np.uint64).reshape(3, 4))
    with pytest.raises(TypeError, match="sealed array|has to be copied"):
        REFUSED[what](words)


def test_views_of_a_sealed_array_are_sealed_and_share_its_memory():
    memory = np.arange(12, dtype=np.uint64).reshape(3, 4)
    words = seal(memory)
    views: list[np.ndarray] = [
        words[1],
        words[0, 0],
        words[:, ::2],
        words.T,
        words.reshape(2, 6),
        words.view(np.int64),
        words[None],
    ]
    views += [np.broadcast_to(words, (2, 3, 4)), *words]
    assert all(isinstance(view, Words) and np.shares_memory(view, words) for view in views)
    assert repr(words) == "Words(shape=(3, 4), dtype=uint64)"  # in a traceback: never a value
    assert type(unseal(words)) is np.ndarray and np.shares_memory(unseal(words), memory)


def test_a_kernel_takes_no_plain_array():
    nobody: Any = None
    machine = Machine(nobody)
    with pytest.raises(TypeError, match=r"kernel 'add' was given a plain array of shape \(3,\): seal\(\) it"):
        machine.call("add", np.ones(3, np.uint64), np.uint64(1), machine.memory(3))


def test_results_of_primitives_are_sealed_and_a_branch_on_one_is_refused():
    def program(party, x):
        bits = party.complete(refmpc.is_negative(x))
        kinds = [type(each).__name__ for each in (x.shares, x.first, (x + 1.0).shares, (x * x).shares, bits.held)]
        with pytest.raises(TypeError, match="sealed array"):
            if x.first[0]:
                pass
        return set(kinds)

    assert evaluate(program, Secret(np.arange(3), 16)).opened == [{"Words"}] * 3
