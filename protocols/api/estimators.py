"""``VerticalClassifier`` and ``VerticalRegressor``: a model on columns that several parties hold, by scikit-learn's conventions.

    from protocols import VerticalClassifier

    model = VerticalClassifier(epsilon=3.0, public={"bank": public_bank, "card": public_card}, id_column="customer_id")
    print(model.estimate(tables, y="defaulted"))         # cost and claim; runs nothing
    model.fit(tables, y="defaulted")                     # tables = {"bank": DataFrame, "card": DataFrame}
    print(model.claim_.paragraph())
    model.predict_proba(new_tables)

X is a table for each party (a dict or a list; the last party has the labels), or one matrix whose columns are split by ``parties``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.metrics import accuracy_score, r2_score
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_array, check_is_fitted, column_or_1d, validate_data

from accel.validate import require, require_choice
from protocols.api.backends import BACKENDS, train
from protocols.api.estimate import Estimate, estimate_of
from protocols.api.inputs import Blocks, Columns, is_blocks, learn_columns
from protocols.inference.prediction import OUTPUTS
from protocols.plan.run_plan import Plan, plan_run
from vfl.data.scaling import RowBound, split_row_bound
from vfl.defaults import AUTOMATIC, table_row_bound, training_defaults
from vfl.federation import Federation
from vfl.gradients import GlobalModel
from vfl.local.client import make_clients
from vfl.tables import Label, Schema
from vfl.tasks import probabilities, scaled_targets, unscaled_targets
from vfl.training import TrainingConfig

__all__ = ["VerticalClassifier", "VerticalRegressor"]

PROTOCOLS = ("g_bmf", "g_shuff")


class _VerticalEstimator(BaseEstimator):  # type: ignore[misc]
    """What both have in common: parameters, the way from tables to a federation, the backends."""

    claim_: Any
    columns_: Columns
    layers_: list[npt.NDArray[np.float64]]

    # what differs ---------------------------------------------------------------------------------

    def _label_of(self, column: str) -> Label:
        raise NotImplementedError

    def _encode(self, y: Any) -> tuple[npt.NDArray[Any], int]:
        """(labels as a run takes them, number of classes; 1 for numbers)."""
        raise NotImplementedError

    def _task(self, classes: int) -> str:
        raise NotImplementedError

    def _weights(self) -> tuple[float, ...]:
        return ()

    def _public_facts(self) -> tuple[str, ...]:
        raise NotImplementedError

    # fitting --------------------------------------------------------------------------------------

    def fit(self, X: Any, y: Any = None) -> Self:
        """Train. ``y``: labels in the order of the rows; or the name of a column of the last party's table; or None if its
        schema has a label. With backend="federation" X is this party's own table (a file or a DataFrame)."""
        require_choice("backend", self.backend, BACKENDS)
        if self.backend == "federation":
            from protocols.api.remote import fit_in_federation

            fit_in_federation(self, X, y)
            return self
        plan, federation = self._planned(X, y)
        trained = train(self.backend, plan, federation, self.timeout)
        self.plan_, self.layers_, self.claim_, self.cost_ = plan, trained.layers, trained.claim, trained.cost
        self.row_bounds_ = tuple(client.row_bound.norm for client in federation.clients)
        return self

    def estimate(self, X: Any, y: Any = None) -> Estimate:
        """What ``fit`` on these rows would cost and claim; runs nothing, and looks at nothing but sizes and classes."""
        if self.backend == "federation":
            from protocols.api.remote import planned_in_federation

            return estimate_of(planned_in_federation(self, X))
        return estimate_of(self._planned(X, y)[0])

    def _planned(self, X: Any, y: Any) -> tuple[Plan, Federation]:
        require_choice("protocol", self.protocol, PROTOCOLS)
        blocks, labels, classes = self._read_for_fit(X, y)
        training = self._training(len(blocks), classes)
        federation = self._federation(blocks, labels, classes)
        return plan_run(self.protocol, federation, training), federation

    def _read_for_fit(self, X: Any, y: Any) -> tuple[Blocks, npt.NDArray[Any], int]:
        label = self._label_of(y) if isinstance(y, str) else None
        if not is_blocks(X):
            require(label is None, "y", y, "labels, where X is one matrix")
            X, y = validate_data(self, X, y, dtype=np.float64, y_numeric=False, multi_output=False)
        self.columns_ = learn_columns(X, self.parties, self.schemas, self.public, self.id_column, label)
        own = y is None or label is not None
        if label is not None and not self.columns_.schemas:
            X, y = _without_column(X, label.column)
            self.columns_, own = learn_columns(X, self.parties, None, None, None, None), False
        schema = self.columns_.schemas.get(self.columns_.names[-1])
        require(
            not own or (schema is not None and schema.label is not None),
            "y",
            y,
            "labels, or the name of a column of the last party's table",
        )
        blocks = self.columns_.read(X, with_label=own)
        if own:
            y = blocks.labels if blocks.targets is None else blocks.targets
        require(not blocks.ids or own, "y", "given", "a column of the last party's table where rows are matched by id")
        encoded, classes = self._encode(y)
        require(len(encoded) == len(blocks), "y", len(encoded), f"one label for each of {len(blocks)} rows")
        return blocks, encoded, classes

    def _training(self, rows: int, classes: int) -> TrainingConfig:
        usual = training_defaults(
            rows,
            self.epsilon,
            hidden=bool(self.hidden),
            regression=classes == 1,
            averaging=self.learning_rate is None and self.average is None,  # a stated rate was chosen for what it gives
        )
        given = {name: getattr(self, name) for name in AUTOMATIC}
        chosen = usual | {name: value for name, value in given.items() if value is not None}
        if self.batch_size is not None and self.epochs is None:  # as many steps in other batches
            steps = int(usual["epochs"]) * (rows // int(usual["batch_size"]))
            chosen["epochs"] = max(1, round(steps / max(1, rows // self.batch_size)))
        return TrainingConfig(
            **chosen,
            epsilon=self.epsilon,
            delta=self.delta,
            clip_norm=self.clip_norm,
            momentum=self.momentum,
            hidden=tuple(self.hidden),
            weights="open",
            task=self._task(classes),
            class_weights=self._weights(),
            seed=_seed(self.random_state),
        )

    def _federation(self, blocks: Blocks, labels: npt.NDArray[Any], classes: int) -> Federation:
        widths = self.columns_.widths
        bound = table_row_bound(sum(widths)) if self.row_bound is None else self.row_bound
        bounds = [RowBound(each, self.row_rule) for each in _bounds(bound, widths, self.row_rule)]
        # by a public permutation: batches are taken in a fixed order, and tables are often sorted by their label
        order = np.random.default_rng([_seed(self.random_state), 0x6F72646572]).permutation(len(labels))
        clients = make_clients([block[order] for block in blocks.features], labels[order], bounds)
        for client, name in zip(clients, self.columns_.names, strict=True):
            client.name = name
        empty: list[npt.NDArray[np.floating[Any]]] = [np.zeros((0, width)) for width in widths]
        public = (*self.columns_.sources, *self._public_facts())
        return Federation(clients, classes, labels[:0], empty, [], bound, public)

    # using ----------------------------------------------------------------------------------------

    def join_prediction(self, X: Any, output: str = "label") -> None:
        """backend="federation", at a party that does not receive predictions: share the columns of new rows while the receiver calls
        ``predict`` ("label", of a regression "value") or ``predict_proba`` ("probabilities")."""
        from protocols.api.remote import join_in_federation

        require(
            self.backend == "federation", "backend", self.backend, "'federation'", "elsewhere predict has all columns"
        )
        require_choice("output", output, OUTPUTS)
        check_is_fitted(self, "layers_")
        join_in_federation(self, X, output)

    def _remote(self, X: Any, output: str) -> npt.NDArray[Any]:
        from protocols.api.remote import predict_in_federation

        check_is_fitted(self, "layers_")
        return predict_in_federation(self, X, output)

    def _outputs(self, X: Any) -> npt.NDArray[np.float64]:
        check_is_fitted(self, "layers_")
        require(self.backend != "federation", "backend", self.backend, "another one for this", "use predict")
        if self.columns_.matrix:
            X = validate_data(self, X, dtype=np.float64, reset=False)
        blocks = self.columns_.read(X)
        rows = [
            RowBound(bound, self.row_rule).apply(block)
            for bound, block in zip(self.row_bounds_, blocks.features, strict=True)
        ]
        found = GlobalModel(list(self.layers_)).logits(np.concatenate(rows, axis=1))
        return np.asarray(found, dtype=np.float64)

    def _own_labels(self, X: Any, y: Any) -> Any:
        """Labels to compare with: as given, or from the last party's table."""
        if y is not None and not isinstance(y, str):
            return y
        blocks = self.columns_.read(X, with_label=True)
        found = blocks.labels if blocks.targets is None else blocks.targets
        require(found is not None, "y", y, "labels to compare with")
        return found

    @property
    def coef_(self) -> npt.NDArray[np.float64]:
        """Of one layer: (outputs, columns), for rows within their bounds."""
        return np.asarray(self.layers_[0][:-1].T)

    @property
    def intercept_(self) -> npt.NDArray[np.float64]:
        """Of one layer."""
        return np.asarray(self.layers_[0][-1])

    # keeping --------------------------------------------------------------------------------------

    def save(self, directory: str | Path) -> Path:
        """Write a folder: each party's model file, as ``ppvfl client`` writes it (private: it holds that party's schema), and this
        estimator's parameters."""
        from protocols.api.files import save

        check_is_fitted(self, "layers_")
        return save(self, Path(directory))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """From a folder that ``save`` wrote, or from one party's model file of ``ppvfl client``."""
        from protocols.api.files import load

        found: Self = load(cls, Path(path))
        return found


class VerticalClassifier(ClassifierMixin, _VerticalEstimator):  # type: ignore[misc]
    """A classifier on columns of several parties, with differential privacy: softmax, or one logit for two classes.

    Parameters
    ----------
    parties : how a single matrix X is split: a number of strips, or {name: columns}. The last one has the labels.
    backend : "twin" (plaintext simulation, fast), "local" (three server processes on this machine), "threads" (the same in this
        process), "federation" (an existing federation.toml; ``federation`` and ``party`` say which).
    epsilon, delta, clip_norm : the privacy that is asked for, and γ. ``claim_`` says what it means.
    row_bound, row_rule : R, which every row is brought within ("clip" or "normalise"); None: from the number of columns.
    batch_size, epochs, learning_rate, average : None: from the number of rows and ε (``vfl.defaults``). ``average`` "fifth": the model is
        the mean over the last fifth of all steps; "exponential"; or "none".
    hidden : widths of hidden layers.
    schemas, public, id_column : how tables become numbers: schemas (``vfl.tables``), or public rows to make them from. Rows are
        matched by ``id_column``; without it row i is the same person at every party.
    classes : all labels that may occur (public); None: those in y, which are then taken as public.
    class_weight : {label: weight}, public: never computed from private labels.
    random_state : of the twin's noise, the order of rows and an MLP's start; never of masks or of the servers' noise.

    Attributes
    ----------
    claim_, classes_, columns_, layers_, plan_, cost_ (rounds, bytes and seconds of a real run), coef_, intercept_.
    """

    def __init__(
        self,
        parties: int | Mapping[str, Sequence[int]] = 2,
        *,
        backend: str = "twin",
        protocol: str = "g_bmf",
        epsilon: float = 3.0,
        delta: float = 1e-5,
        clip_norm: float = 1.0,
        row_bound: float | None = None,
        row_rule: str = "clip",
        batch_size: int | None = None,
        epochs: int | None = None,
        learning_rate: float | None = None,
        average: str | None = None,
        momentum: float = 0.0,
        hidden: Sequence[int] = (),
        schemas: Mapping[str, Schema] | None = None,
        public: Any = None,
        id_column: str | None = None,
        classes: Sequence[Any] | None = None,
        class_weight: Mapping[Any, float] | None = None,
        federation: str | Path | None = None,
        party: str | None = None,
        timeout: float = 60.0,
        random_state: Any = 0,
    ):
        self.parties = parties
        self.backend = backend
        self.protocol = protocol
        self.epsilon = epsilon
        self.delta = delta
        self.clip_norm = clip_norm
        self.row_bound = row_bound
        self.row_rule = row_rule
        self.batch_size = batch_size
        self.epochs = epochs
        self.learning_rate = learning_rate
        self.average = average
        self.momentum = momentum
        self.hidden = hidden
        self.schemas = schemas
        self.public = public
        self.id_column = id_column
        self.classes = classes
        self.class_weight = class_weight
        self.federation = federation
        self.party = party
        self.timeout = timeout
        self.random_state = random_state

    def _label_of(self, column: str) -> Label:
        return Label(column)

    def _encode(self, y: Any) -> tuple[npt.NDArray[Any], int]:
        y = column_or_1d(y, warn=True)
        check_classification_targets(y)
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

    def _task(self, classes: int) -> str:
        return "binary" if classes == 2 and not self.hidden else "classification"

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
        return tuple(float(self.class_weight.get(label, 1.0)) for label in self.classes_.tolist())

    def _public_facts(self) -> tuple[str, ...]:
        return ("which classes there are is public",)

    def decision_function(self, X: Any) -> npt.NDArray[np.float64]:
        """Logits: one for each class, or for two classes that of the second."""
        found = self._outputs(X)
        if len(self.classes_) == 2:
            return found[:, 0] if found.shape[1] == 1 else found[:, 1] - found[:, 0]
        return found

    def predict_proba(self, X: Any) -> npt.NDArray[np.float64]:
        """Of each class, in the order of ``classes_``. In a federation: computed on shares, for the common rows in the order of this
        party's table, at the receiver; the others call ``join_prediction``."""
        if self.backend == "federation":
            return self._remote(X, "probabilities").astype(np.float64)
        found = self._outputs(X)
        task = "binary" if found.shape[1] == 1 else "classification"
        return np.asarray(probabilities(task, found), dtype=np.float64)

    def predict(self, X: Any) -> npt.NDArray[Any]:
        """The most likely class of each row; in a federation as ``predict_proba``."""
        if self.backend == "federation":
            return np.asarray(self._remote(X, "label")[:, 0])
        shares = self.predict_proba(X)  # before classes_, which there is none of without a fit
        return np.asarray(self.classes_[shares.argmax(axis=1)])

    def score(self, X: Any, y: Any = None, sample_weight: Any = None) -> float:
        """Accuracy. Outside the claim: it says something about the rows it is computed on."""
        return float(accuracy_score(self._own_labels(X, y), self.predict(X), sample_weight=sample_weight))


class VerticalRegressor(RegressorMixin, _VerticalEstimator):  # type: ignore[misc]
    """Linear regression with squared loss on columns of several parties, with differential privacy.

    ``target_range``: (lowest, highest), public; targets beyond it count as its ends. Other parameters as in ``VerticalClassifier``.
    """

    def __init__(
        self,
        parties: int | Mapping[str, Sequence[int]] = 2,
        *,
        target_range: tuple[float, float] | None = None,
        backend: str = "twin",
        protocol: str = "g_bmf",
        epsilon: float = 3.0,
        delta: float = 1e-5,
        clip_norm: float = 1.0,
        row_bound: float | None = None,
        row_rule: str = "clip",
        batch_size: int | None = None,
        epochs: int | None = None,
        learning_rate: float | None = None,
        average: str | None = None,
        momentum: float = 0.0,
        schemas: Mapping[str, Schema] | None = None,
        public: Any = None,
        id_column: str | None = None,
        federation: str | Path | None = None,
        party: str | None = None,
        timeout: float = 60.0,
        random_state: Any = 0,
    ):
        self.parties = parties
        self.target_range = target_range
        self.backend = backend
        self.protocol = protocol
        self.epsilon = epsilon
        self.delta = delta
        self.clip_norm = clip_norm
        self.row_bound = row_bound
        self.row_rule = row_rule
        self.batch_size = batch_size
        self.epochs = epochs
        self.learning_rate = learning_rate
        self.average = average
        self.momentum = momentum
        self.schemas = schemas
        self.public = public
        self.id_column = id_column
        self.federation = federation
        self.party = party
        self.timeout = timeout
        self.random_state = random_state

    hidden: tuple[int, ...] = ()

    @property
    def _range(self) -> tuple[float, float]:
        given = self.target_range
        require(
            given is not None and len(given) == 2 and float(given[0]) < float(given[1]),
            "target_range",
            given,
            "(lowest, highest) of the target, public",
            "its smallest and largest private value would be a release that the claim does not cover",
        )
        assert given is not None
        return float(given[0]), float(given[1])

    def _label_of(self, column: str) -> Label:
        return Label(column, "number", range=self._range)

    def _encode(self, y: Any) -> tuple[npt.NDArray[Any], int]:
        y = check_array(column_or_1d(y, warn=True), ensure_2d=False, dtype=np.float64, input_name="y")
        return scaled_targets(y, self._range), 1

    def _task(self, classes: int) -> str:
        return "regression"

    def _public_facts(self) -> tuple[str, ...]:
        return ()

    def predict(self, X: Any) -> npt.NDArray[np.float64]:
        """The number of each row, in the units of the target; in a federation at the receiver, the others call ``join_prediction``."""
        if self.backend == "federation":
            return np.asarray(self._remote(X, "value")[:, 0], dtype=np.float64)
        return np.asarray(unscaled_targets(self._outputs(X)[:, 0], self._range), dtype=np.float64)

    def score(self, X: Any, y: Any = None, sample_weight: Any = None) -> float:
        """R². Outside the claim: it says something about the rows it is computed on."""
        return float(r2_score(self._own_labels(X, y), self.predict(X), sample_weight=sample_weight))


def _seed(random_state: Any) -> int:
    if isinstance(random_state, int | np.integer):
        return int(random_state)
    return int(check_random_state(random_state).randint(2**31 - 1))


def _bounds(row_bound: float, widths: Sequence[int], rule: str) -> tuple[float, ...]:
    """R_i of every party: by width with ``clip``, the same for all with ``normalise``."""
    return split_row_bound(row_bound, len(widths), list(widths) if rule == "clip" else None)


def _without_column(X: Any, column: str) -> tuple[Any, Any]:
    """The label column of the last party's DataFrame, and all tables without it."""
    parts = dict(X) if isinstance(X, Mapping) else dict(enumerate(X))
    last = list(parts)[-1]
    table = parts[last]
    require(
        hasattr(table, "columns") and column in table.columns,
        "y",
        column,
        "labels, or the name of a column of the last party's table",
    )
    parts[last] = table.drop(columns=[column])
    return (parts if isinstance(X, Mapping) else list(parts.values())), table[column].to_numpy()
