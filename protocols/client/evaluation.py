"""The label client compares predictions that it received with its own labels: figures on the terminal, a report as a
file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Column, Table

from accel.validate import require
from protocols.client.columns import OwnColumns
from protocols.plan.public_rows import PublicRows
from protocols.state.model_file import ReleasedModel
from vfl.dp.claim import NO_CLAIM
from vfl.evaluation import OUTSIDE, Evaluation, LearningCurve, evaluate_classes, evaluate_numbers, write_report
from vfl.losses import unscaled_targets

__all__ = ["evaluation_output", "print_evaluation"]


def evaluation_output(model: ReleasedModel) -> str:
    """What has to be opened for an evaluation: the same at all clients."""
    return "probabilities" if model.task != "regression" else "value"


def print_evaluation(
    own: OwnColumns,
    rows: np.ndarray,
    found: np.ndarray,
    model: ReleasedModel,
    file: Path,
    *,
    held_out: bool,
    as_json: bool,
    public: PublicRows | None = None,
    non_private: Mapping[str, float] | None = None,
) -> Evaluation:
    """``found[i]`` is the prediction for the client's own row ``rows[i]``. Writes ``file`` and prints figures, at the
    label client only."""
    if model.target_range is None:
        evaluation = evaluate_classes(own.label_numbers(rows, model.classes), found, model.classes)
    else:
        assert own.table.targets is not None
        evaluation = evaluate_numbers(own.table.targets[rows], unscaled_targets(found[:, 0], model.target_range))
    words = (
        "held-out rows, chosen before the training" if held_out else "labelled rows that were given for this evaluation"
    )
    unknown = sorted(set(non_private or {}) - set(evaluation.metrics))
    require(
        not unknown, "--non-private", ", ".join(unknown), f"figures of this report: {', '.join(evaluation.metrics)}"
    )
    write_report(
        file,
        evaluation,
        title="Evaluation of the released model",
        claim=model.claim,
        rows_in_words=words,
        non_private=non_private,
        learning_curve=_curve(model, public),
    )
    if as_json:
        begin = {"no_claim": NO_CLAIM} if model.claim.startswith(NO_CLAIM) else {}
        print(json.dumps({**begin, **evaluation.as_dict(), "report": str(file), "held_out": held_out}, indent=2))
        return evaluation
    heads = ["this model", "best constant answer", *(["without privacy"] if non_private else [])]
    view = Table("", *(Column(head, justify="right") for head in heads), title=f"{evaluation.rows:,} {words}")
    for name, value in evaluation.metrics.items():
        cells = [value, evaluation.chance.get(name), *([non_private.get(name)] if non_private else [])]
        view.add_row(name, *("" if cell is None else _shown(cell) for cell in cells))
    console = Console()
    console.print(view)
    console.print(OUTSIDE.format(rows=evaluation.rows))
    console.print(f"[bold]{file}[/bold]: the report")
    return evaluation


def _curve(model: ReleasedModel, public: PublicRows | None) -> LearningCurve | None:
    """What the servers measured after every epoch, with the accuracy of a constant answer beside it."""
    if public is None or not model.curve:
        return None
    chance = float(np.bincount(public.labels).max() / len(public))
    return LearningCurve(tuple((epoch, right) for epoch, right, _ in model.curve), len(public), chance)


def _shown(value: float) -> str:
    return "not defined" if math.isnan(value) else f"{value:.4f}"
