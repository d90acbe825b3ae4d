"""Two organisations' tables with text, gaps and other people: made here, nothing to download."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas

__all__ = ["BANK", "CARD", "make_tables"]

BANK, CARD = ("income", "job", "since"), ("purchases", "abroad")


def make_tables(rows: int, seed: int = 0, *, first: int = 0) -> tuple[dict[str, Any], np.ndarray]:
    """(tables of a bank and a card company, the number behind the labels of the card company's people). The bank knows
    some people more, in another order."""
    random = np.random.default_rng(seed)
    everybody = rows + rows // 10
    ids = np.array([f"person-{first + i}" for i in range(everybody)])
    income = random.lognormal(10, 0.5, everybody)
    job = random.choice(["clerk", "nurse", "driver", "chef"], everybody)
    since = pandas.to_datetime("2010-01-01") + pandas.to_timedelta(random.integers(0, 3000, everybody), unit="D")
    purchases = random.poisson(20, everybody).astype(float)
    abroad = random.random(everybody) < 0.3
    hidden = np.log(income) - 10 + 0.8 * (job == "nurse") + 0.05 * (purchases - 20) - 0.7 * abroad
    target = hidden + 0.3 * random.normal(size=everybody)
    bank = pandas.DataFrame({"customer": ids, "income": income, "job": job, "since": since})
    bank.loc[random.random(everybody) < 0.05, "income"] = np.nan
    card = pandas.DataFrame({"customer": ids, "purchases": purchases, "abroad": abroad})
    card["spent"], card["defaulted"] = target, np.where(target > 0.1, "yes", "no")
    order = random.permutation(everybody)
    return {"bank": bank.iloc[order].reset_index(drop=True), "card": card.iloc[:rows]}, target[:rows]
