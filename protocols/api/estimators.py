"""``VerticalClassifier`` and ``VerticalRegressor``: a model on columns that several parties hold, by scikit-learn's
conventions.

    from ppvfl import VerticalClassifier

    model = VerticalClassifier(epsilon=3.0, public={"bank": public_bank, "card": public_card}, id_column="customer_id")
    print(model.estimate(tables, y="defaulted"))         # cost and claim; runs nothing
    model.fit(tables, y="defaulted")                     # tables = {"bank": DataFrame, "card": DataFrame}
    print(model.claim_.paragraph())
    model.predict_proba(new_tables)

X is a table for each party (a dict or a list; the last party has the labels), or one matrix whose columns are split by
``parties``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.metrics import accuracy_score, r2_score
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_array, column_or_1d

from accel.validate import require
from protocols.api.base import VerticalEstimator, with_options
from protocols.api.inputs import texts_of
from vfl.losses import probabilities, scaled_targets, unscaled_targets
from vfl.tables import Label

__all__ = ["VerticalClassifier", "VerticalRegressor"]


@with_options({"classes": None, "class_weight": None})
class VerticalClassifier(ClassifierMixin, VerticalEstimator):  # type: ignore[misc]
    """A classifier on columns of several parties, with differential privacy: softmax, or one logit for two classes.

    Parameters
    ----------
    parties : how a single matrix X is split: a number of strips, or {name: columns}. The last one has the labels.
    backend : "local" (the real protocol: three server processes on this machine), "threads" (the same in this process),
        "federation" (an existing federation.toml; ``federation`` and ``party`` say which), or "twin": a fast simulation
        in the clear, which claims nothing, because its noise can be repeated.
    protocol : "g_bmf" or "g_shuff".
    epsilon, delta, clip_norm, order, … : every option of the table in docs/reference/options.md that estimators take,
    under its name.
        None: chosen from public sizes. ``claim_`` says what the privacy means.
    schemas, public, id_column : how tables become numbers: schemas (``vfl.tables``), or public rows to make them from.
    Rows are
        matched by ``id_column``; without it row i is the same person at every party.
    id_rule : how ids are compared where ``public`` rows make the schemas: "text", "trimmed", "integer" (007 is 7) or
    "verbatim".
    classes : all labels that may occur (public); None: those in y, which are then taken as public.
    class_weight : {label: weight}, public: never computed from private labels.
    budget : a ``PrivacyBudget`` that every real fit is charged to, and refused beyond. None: real fits of this process
    are counted,
        and from the second on a ``PrivacyWarning`` says what they spend together.
    random_state : of the order of rows, an MLP's start and a twin's noise; never of masks or of the servers' noise.
    None: the
        system's entropy.

    Attributes
    ----------
    claim_, classes_, columns_, layers_, plan_, cost_ (rounds, bytes and seconds of a real run), coef_, intercept_,
    predict_ids_. For the owner of the rows alone: n_rows_ (trained on), table_rows_ (of each table), clipped_share_ (of
    each party's rows), spent_ ((ε, δ) of all real fits of this process, if they are about the same people).
    """

    def _label_of(self, column: str) -> Label:
        return Label(column)

    def _encode(self, y: Any) -> tuple[npt.NDArray[Any], int]:
        y = column_or_1d(y, warn=True)
        check_classification_targets(y)
        stated = self.classes is None or isinstance(self.classes, list | tuple | np.ndarray)
        require(stated, "classes", self.classes, "a list of all labels that may occur, or None")
        known = np.unique(y) if self.classes is None else np.asarray(list(self.classes))
        require(
            len(known) >= 2, "classes", len(known), "2 or more: a classifier can't train when only one class is present"
        )
        self.classes_ = known
        order = np.argsort(known)
        at = np.searchsorted(known[order], y)
        found = order[np.minimum(at, len(known) - 1)]
        require(bool((known[found] == y).all()), "y", "labels that are no class", f"among {known.tolist()}")
        return found.astype(np.int64), len(known)

    def _weights(self) -> tuple[float, ...]:
        if self.class_weight is None:
            return ()
        require(
            isinstance(self.class_weight, Mapping),
            "class_weight",
            self.class_weight,
            "{label: weight} with public weights",
            "'balanced' would count the private labels, which the claim does not cover",
        )
        known = self.classes_.tolist()
        others = [label for label in self.class_weight if label not in known]
        require(
            not others,
            "class_weight",
            others,
            f"weights of the classes {known}",
            "remove labels that never occur, or add them to classes",
        )
        return tuple(float(self.class_weight.get(label, 1.0)) for label in known)

    def _public_facts(self) -> tuple[str, ...]:
        return ("which classes there are is public",)

    def decision_function(self, X: Any) -> Any:
        """Logits: one for each class, or for two classes that of the second. Rows as in ``predict``."""
        found = self._logits(self._scaled(X))
        if len(self.classes_) == 2:
            found = found[:, 0] if found.shape[1] == 1 else found[:, 1] - found[:, 0]
        return self._shown(X, found, self.classes_.tolist())

    def predict_proba(self, X: Any) -> Any:
        """The probability of each class, in the order of ``classes_``. Rows as in ``predict``."""
        if self.backend == "federation":
            found = self._remote(X, "probabilities").astype(np.float64)
        else:
            found = self._of_rows(self._scaled(X))
        return self._shown(X, found, self.classes_.tolist())

    def _of_rows(self, rows: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        found = self._logits(rows)
        task = "binary" if found.shape[1] == 1 else "classification"
        return np.asarray(probabilities(task, found), dtype=np.float64)

    def predict(self, X: Any) -> Any:
        """The most likely class of each row, an array of the type of the labels of ``fit``.

        Where rows are matched by id, the common rows in the order of the label party's table, with their ids: a pandas
        Series (of tables of pandas), or an Arrow table; ``predict_ids_`` holds the ids too, for arrays. In a
        federation: computed on shares, for the common rows in the order of this party's table, at the receiver; the
        others call ``join_prediction``."""
        return self._shown(X, self._predicted(X))

    def _predicted(self, X: Any) -> npt.NDArray[Any]:
        if self.backend == "federation":
            known = dict(zip(texts_of(self.classes_), self.classes_.tolist(), strict=True))
            return np.array([known.get(text, text) for text in self._remote(X, "label")[:, 0].tolist()])
        shares = self._of_rows(self._scaled(X))  # before classes_, which there is none of without a fit
        return np.asarray(self.classes_[shares.argmax(axis=1)])

    def score(self, X: Any, y: Any = None, sample_weight: Any = None) -> float:
        """Accuracy. Outside the claim: it says something about the rows it is computed on."""
        return float(accuracy_score(self._own_labels(X, y), self._predicted(X), sample_weight=sample_weight))


@with_options({"target_range": None}, without=("hidden",))
class VerticalRegressor(RegressorMixin, VerticalEstimator):  # type: ignore[misc]
    """Linear regression with squared loss on columns of several parties, with differential privacy.

    ``target_range``: (lowest, highest), public; targets beyond it count as its ends. Other parameters as in
    ``VerticalClassifier``.
    """

    hidden: tuple[int, ...] = ()

    @property
    def _range(self) -> tuple[float, float]:
        given = self.target_range
        require(
            isinstance(given, list | tuple) and len(given) == 2 and float(given[0]) < float(given[1]),
            "target_range",
            given,
            "(lowest, highest) of the target, public",
            "the private minimum and maximum would be released without noise, so state a public range",
        )
        assert given is not None
        return float(given[0]), float(given[1])

    def _label_of(self, column: str) -> Label:
        return Label(column, "number", range=self._range)

    def _encode(self, y: Any) -> tuple[npt.NDArray[Any], int]:
        y = check_array(column_or_1d(y, warn=True), ensure_2d=False, dtype=np.float64, input_name="y")
        return scaled_targets(y, self._range), 1

    def _public_facts(self) -> tuple[str, ...]:
        return ()

    def predict(self, X: Any) -> Any:
        """The number of each row, in the units of the target. Rows, and what a federation does, as in
        ``VerticalClassifier.predict``."""
        return self._shown(X, self._predicted(X))

    def _predicted(self, X: Any) -> npt.NDArray[np.float64]:
        if self.backend == "federation":
            return np.asarray(self._remote(X, "value")[:, 0], dtype=np.float64)
        return self._of_rows(self._scaled(X))

    def _of_rows(self, rows: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return np.asarray(unscaled_targets(self._logits(rows)[:, 0], self._range), dtype=np.float64)

    def score(self, X: Any, y: Any = None, sample_weight: Any = None) -> float:
        """R². Outside the claim: it says something about the rows it is computed on."""
        return float(r2_score(self._own_labels(X, y), self._predicted(X), sample_weight=sample_weight))
