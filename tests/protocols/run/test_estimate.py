"""`--estimate` says what either kind of noise would cost, so that a user can trade."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from protocols.methods import g_bmf
from protocols.run.launch import main

SMALL = ["--epochs", "2", "--batch-size", "512", "--estimate"]


def estimated(capsys, *more: str) -> dict[str, Any]:
    main("g_bmf", g_bmf.__doc__, [*SMALL, "--json", *more])
    return json.loads(capsys.readouterr().out)


def test_both_noises_are_costed_and_are_those_of_their_own_runs(capsys):
    here, there = estimated(capsys), estimated(capsys, "--noise", "joint")
    assert here["noise"] == there["noise"]
    distributed, joint = here["noise"]["distributed"], here["noise"]["joint"]
    for found, choice in ((here, distributed), (there, joint)):
        for key in ("rounds", "bytes", "seconds_lan", "seconds_wan"):
            assert choice[key] == found[key]
    assert joint["bytes"] > distributed["bytes"] and joint["rounds"] > distributed["rounds"]
    # 1.5σ² against σ²
    assert distributed["model_noise"] / joint["model_noise"] == pytest.approx(math.sqrt(1.5), rel=0.01)


def test_a_noise_that_cannot_be_had_says_why(capsys):
    found = estimated(capsys, "--factorisation", "bsr")
    assert "recursion that rounds" in found["noise"]["joint"]["refused"]
    main("g_bmf", g_bmf.__doc__, [*SMALL, "--factorisation", "bsr"])
    printed = " ".join(capsys.readouterr().out.split())
    assert "joint noise cannot be had here" in printed and "Who makes the noise" in printed
