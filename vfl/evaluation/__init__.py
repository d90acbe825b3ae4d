"""Whether a model is any good: figures on rows that took no part in the training, and a report with the usual curves.

Everything here looks at labels of private rows in the clear, at their owner. It is outside every privacy claim: whoever
is shown a figure learns something about these rows (not about those of the training, which the model's claim covers).
"""

from vfl.evaluation.metrics import Evaluation, evaluate_classes, evaluate_numbers
from vfl.evaluation.report import OUTSIDE, LearningCurve, report_html, write_report

__all__ = [
    "OUTSIDE",
    "Evaluation",
    "LearningCurve",
    "evaluate_classes",
    "evaluate_numbers",
    "report_html",
    "write_report",
]
