"""The estimate of every phase is what the ledger counts, to the byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from protocols.methods import g_bmf, g_shuff
from protocols.plan import row_test
from protocols.run import phase_costs as costs
from protocols.run.phase_costs import phase_costs
from protocols.server import verification
from protocols.step import clip
from tests.protocols.state.test_stored_rows import make_plan, train


@pytest.mark.parametrize(
    ("module", "rows", "changes"),
    [
        (g_bmf, 200, {}),
        (g_bmf, 330, {"task": "binary", "classes": 2}),
        (g_bmf, 200, {"task": "regression", "classes": 1, "weights": "secret"}),
        (g_bmf, 200, {"weights": "secret", "noise": "joint", "epsilon": 3.0}),
        (g_shuff, 200, {"protocol": "g_shuff", "epochs": 2}),
    ],
)
def test_the_estimate_is_what_happens(
    module: Any, rows: int, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With blocks of 64 rows, so that there are several and a shorter one at the end."""
    blocks = {
        "NORM_ROWS": (verification, costs, row_test),
        "COMPARED_ROWS": (verification, costs),
        "PIECE_ROWS": (verification,),
    }
    for name, places in {**blocks, "NORM_CHUNK": (clip, costs)}.items():
        for place in places:
            monkeypatch.setattr(place, name, 64)
    plan = make_plan(rows, **changes)
    found = phase_costs(plan, keeps_steps=True)
    result = train(plan, tmp_path, module.servers, every=1)
    happened = {
        name: (phase.rounds, sum(ledger.phases[name].bytes_sent for ledger in result.ledgers))
        for name, phase in result.ledgers[0].phases.items()
    }
    if plan.opens_sums:  # fewer bits of the logits while weights are small
        rounds, size = happened.pop("training")
        bound = found.pop("training")
        assert rounds == bound.rounds and 0.7 * bound.bytes < size <= bound.bytes
    assert {name: (cost.rounds, cost.bytes) for name, cost in found.items()} == happened
