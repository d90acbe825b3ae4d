"""The federation of many rows, at a small size: every phase is there, and the estimate is what happened."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench.scale import tables
from bench.scale.__main__ import SERVERS, beside_estimate, beside_forecast, measure
from bench.scale.tables import CLIENTS, ID, LABEL, make_tables


def test_both_clients_have_the_same_people_in_other_orders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(tables, "BLOCK", 64)
    files = make_tables(tmp_path, 150, 7)
    bank, card = (parquet.read_table(files[client]).to_pydict() for client in CLIENTS)
    assert len(bank) == 1 + 3 and len(card) == 1 + 4 + 1
    assert set(bank[ID]) == set(card[ID]) and len(set(bank[ID])) == 150 and bank[ID] != card[ID]
    assert set(card[LABEL]) == {"no", "yes"}
    assert all(np.abs(bank[name]).max() <= 1 for name in bank if name != ID)


@pytest.mark.heavy
def test_a_small_federation_costs_what_is_estimated(tmp_path: Path) -> None:
    found = measure(tmp_path, 12_000, 10, 256, 1, "g_bmf", 240.0)
    compared = beside_estimate(found)
    assert compared["rounds"][0] == compared["rounds"][1]
    for name in ("bytes", "upload_bytes"):
        estimated, happened = compared[name]
        assert 0.8 < estimated / happened < 1.2, name
    times = beside_forecast(
        found
    )  # how near depends on the machine's load: that they are about the same phases does not
    assert set(times) == {"align", "upload", "tests of the rows", "norms for the clip", "training", "all of these"}
    assert all(estimated > 0 and happened > 0 for estimated, happened in times.values())
    assert set(found.highest) == {*SERVERS, *CLIENTS} and min(found.highest.values()) > 0
    names = [phase.name for phase in found.phases]
    assert names[1:4] == ["start and read", "align", "upload"] and names[-2:] == ["release", "hand over"]
