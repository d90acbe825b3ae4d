"""What both estimators have in common: from tables to a federation, the backends, evaluation and files.

``fit`` and ``estimate`` make one plan from the same rows; nothing is fitted on the rows that are trained on but the
model.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data

from accel.validate import require, require_choice
from protocols.api.account import charge, warn_of_clipping, warn_of_noise, warn_of_unmatched
from protocols.api.backends import BACKENDS, train
from protocols.api.estimate import Estimate, estimate_of
from protocols.api.inputs import Blocks, Columns, is_blocks, learn_columns, path_of, require_matrix, texts_of, with_ids
from protocols.methods.prediction import OUTPUTS
from protocols.plan.combinations import usual_task
from protocols.plan.run_plan import Plan, plan_run
from protocols.settings import declared, estimator_signature, refuse_what_is_not_taken
from vfl.data.scaling import RowBound, split_row_bound
from vfl.defaults import chosen_training, table_row_bound
from vfl.dp.claim import NO_CLAIM
from vfl.evaluation import Evaluation
from vfl.federation import Federation
from vfl.gradients import GlobalModel
from vfl.hidden import activation
from vfl.local.client import make_clients
from vfl.methods import G_BMF, SECURE, facts
from vfl.settings import Setting
from vfl.tables import Label
from vfl.training import TrainingConfig

__all__ = ["VerticalEstimator"]

Estimator = TypeVar("Estimator", bound="VerticalEstimator")
PROTOCOLS = tuple(name for name in SECURE if facts(name).takes("frozen rows"))


OWN: dict[str, Any] = {
    "parties": 2,
    "backend": "local",
    "protocol": G_BMF,
    "schemas": None,
    "public": None,
    "id_column": None,
    "id_rule": "text",
    "federation": None,
    "party": None,
    "budget": None,
    "random_state": None,
}


def with_options(own: Mapping[str, Any], without: Sequence[str] = ()) -> Callable[[type[Estimator]], type[Estimator]]:
    """Give an estimator its arguments: those of every estimator, its ``own`` ones, and the declared options
    (``protocols.settings``)."""
    signature = estimator_signature((OWN | dict(own)).items(), without)

    def decorate(estimator: type[Estimator]) -> type[Estimator]:
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            given = signature.bind(self, *args, **kwargs)
            given.apply_defaults()
            for name, value in list(given.arguments.items())[1:]:
                setattr(self, name, value)

        __init__.__signature__ = signature  # type: ignore[attr-defined]
        estimator.__init__ = __init__  # type: ignore[method-assign]
        return estimator

    return decorate


class VerticalEstimator(BaseEstimator, ABC):  # type: ignore[misc]
    """What both have in common: parameters, the way from tables to a federation, the backends."""

    def __init__(self, parties: Any = 2, **options: Any):
        """``with_options`` replaces it."""
        raise NotImplementedError

    claim_: Any
    classes_: npt.NDArray[Any]
    predict_ids_: npt.NDArray[Any]
    columns_: Columns
    layers_: list[npt.NDArray[np.float64]]

    # what differs ---------------------------------------------------------------------------------

    @abstractmethod
    def _label_of(self, column: str) -> Label:
        """What a schema says of the label."""

    @abstractmethod
    def _encode(self, y: Any) -> tuple[npt.NDArray[Any], int]:
        """(labels as a run takes them, number of classes; 1 for numbers)."""

    def _weights(self) -> tuple[float, ...]:
        return ()

    @abstractmethod
    def _public_facts(self) -> tuple[str, ...]:
        """What a claim lists as public about the labels."""

    # fitting --------------------------------------------------------------------------------------

    def fit(self, X: Any, y: Any = None) -> Self:
        """Train. ``y``: labels in the order of the rows; or the name of a column of the last party's table; or None if
        its schema has a label. With backend="federation" X is this party's own table (a file or a DataFrame)."""
        require_choice("backend", self.backend, BACKENDS)
        if self.backend == "federation":
            from protocols.api.remote import fit_in_federation, planned_in_federation

            self.spent_ = charge(planned_in_federation(self, X), self.budget)
            fit_in_federation(self, X, y)
            return self
        plan, federation = self._planned(X, y, told=True)
        warn_of_noise(plan)
        self.spent_ = charge(plan, self.budget)
        trained = train(self.backend, plan, federation, self.timeout)
        self.plan_, self.layers_, self.claim_, self.cost_ = plan, trained.layers, trained.claim, trained.cost
        self.activation_ = activation(plan.training.hidden, plan.training.weights)
        self.row_bounds_ = tuple(client.row_bound.norm for client in federation.clients)
        return self

    def estimate(self, X: Any, y: Any = None) -> Estimate:
        """What ``fit`` on these rows would cost and claim; runs nothing, and looks at nothing but sizes and classes."""
        if self.backend == "federation":
            from protocols.api.remote import planned_in_federation

            return estimate_of(planned_in_federation(self, X))
        return estimate_of(self._planned(X, y)[0])

    def _planned(self, X: Any, y: Any, *, told: bool = False) -> tuple[Plan, Federation]:
        """``told``: what the rows are like is kept for their owner, and what looks wrong is warned of."""
        require_choice("protocol", self.protocol, PROTOCOLS)
        blocks, labels, classes = self._read_for_fit(X, y)
        seed = _seed(self.random_state)
        training = self._training(len(blocks), classes, seed)
        federation = self._federation(blocks, labels, classes, seed)
        if told:
            self._tell(blocks, federation)
        plan = plan_run(self.protocol, federation, training)
        return (plan.as_simulation() if self.backend == "twin" else plan), federation

    def _read_for_fit(self, X: Any, y: Any) -> tuple[Blocks, npt.NDArray[Any], int]:
        label = self._label_of(y) if isinstance(y, str) else None
        if not is_blocks(X):
            require(label is None, "y", y, "labels, where X is one matrix")
            require_matrix(X)
            X, y = validate_data(self, X, y, dtype=np.float64, y_numeric=False, multi_output=False)
        self.columns_ = learn_columns(X, self.parties, self.schemas, self.public, self.id_column, label, self.id_rule)
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
            y = blocks.typed_labels if blocks.targets is None else blocks.targets
        require(not blocks.ids or own, "y", "given", "a column of the last party's table where rows are matched by id")
        encoded, classes = self._encode(y)
        require(len(encoded) == len(blocks), "y", len(encoded), f"one label for each of {len(blocks)} rows")
        return blocks, encoded, classes

    def _training(self, rows: int, classes: int, seed: int) -> TrainingConfig:
        given = {each.name: each.check(getattr(self, each.name)) for each in declared("api") if self._states(each)}
        refuse_what_is_not_taken(self.protocol, given)
        given = {each.name: given[each.name] for each in declared("api", of=TrainingConfig) if each.name in given}
        chosen = chosen_training(
            given,
            rows,
            regression=classes == 1,
            averages=facts(self.protocol).takes("averages"),
        )
        task = (
            "regression" if classes == 1 else usual_task(facts(self.protocol), classes, tuple(self.hidden), "factored")
        )
        own = {"task": task, "class_weights": self._weights(), "seed": seed}
        return TrainingConfig(**(given | chosen | own))

    def _states(self, each: Setting) -> bool:
        """Whether a parameter is given, so that nothing is chosen for it."""
        return hasattr(self, each.name) and (getattr(self, each.name) is not None or each.optional)

    def _federation(self, blocks: Blocks, labels: npt.NDArray[Any], classes: int, seed: int) -> Federation:
        widths = self.columns_.widths
        bound = table_row_bound(sum(widths)) if self.row_bound is None else self.row_bound
        bounds = [RowBound(each, self.row_rule) for each in _bounds(bound, widths, self.row_rule)]
        # by a public permutation: batches are taken in a fixed order, and tables are often sorted by their label
        order = np.random.default_rng([seed, 0x6F72646572]).permutation(len(labels))
        clients = make_clients([block[order] for block in blocks.features], labels[order], bounds)
        for client, name in zip(clients, self.columns_.names, strict=True):
            client.name = name
        empty: list[npt.NDArray[np.floating[Any]]] = [np.zeros((0, width)) for width in widths]
        public = (*self.columns_.sources, *self._public_facts())
        return Federation(clients, classes, labels[:0], empty, [], bound, public)

    def _tell(self, blocks: Blocks, federation: Federation) -> None:
        self.n_rows_, self.table_rows_ = len(blocks), blocks.given
        if blocks.ids is not None:
            warn_of_unmatched(blocks.given, len(blocks))
        scaled = bool(self.columns_.schemas)
        self.clipped_share_ = {
            client.name: warn_of_clipping(client.name, block, client.row_bound, scaled=scaled)
            for client, block in zip(federation.clients, blocks.features, strict=True)
        }

    # using ----------------------------------------------------------------------------------------

    def join_prediction(self, X: Any, output: str = "label") -> None:
        """backend="federation", at a party that does not receive predictions: share the columns of new rows while the
        receiver calls ``predict`` ("label", of a regression "value") or ``predict_proba`` ("probabilities")."""
        from protocols.api.remote import join_in_federation

        require_choice("output", output, OUTPUTS)
        require(
            self.backend == "federation",
            "backend",
            self.backend,
            "'federation'",
            "with other backends predict has all columns",
        )
        check_is_fitted(self, "layers_")
        join_in_federation(self, X, output)

    def _remote(self, X: Any, output: str) -> npt.NDArray[Any]:
        from protocols.api.remote import predict_in_federation

        check_is_fitted(self, "layers_")
        found, self.predict_ids_ = predict_in_federation(self, X, output)
        return found

    def _shown(self, X: Any, found: npt.NDArray[Any], names: Sequence[Any] = ()) -> Any:
        """Predictions with what identifies their rows, where rows were matched by id."""
        if self.backend == "federation":
            return with_ids(X, str(self.id_column), self.predict_ids_, found, names)
        columns = self.columns_
        if not columns.aligned_by_id:
            return found
        return with_ids(X, columns.schemas[columns.names[-1]].id.column, self.predict_ids_, found, names)

    def evaluate(
        self, X: Any, y: Any = None, *, report: str | Path | None = None, non_private: tuple[Any, Any] | None = None
    ) -> Evaluation:
        """Figures on rows that took no part in the training: AUC, F1, average precision, calibration, confusion; or
        RMSE, MAE, R².

        ``y`` as in ``score``. ``report``: an HTML page with curves. ``non_private``: (X, y) to train scikit-learn's
        linear model on, without privacy, for a column beside; of public or made-up rows, or where nobody else sees the
        page. All of it is outside the claim.
        """
        from protocols.api.evaluation import evaluate

        check_is_fitted(self, "layers_")
        return evaluate(self, X, y, report=report, non_private=non_private)

    @abstractmethod
    def _of_rows(self, rows: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Probabilities, or numbers, of rows that are scaled and within their bounds."""

    def _scaled(self, X: Any) -> npt.NDArray[np.float64]:
        """All parties' columns side by side, scaled and within their bounds."""
        check_is_fitted(self, "layers_")
        require(
            self.backend != "federation",
            "backend",
            self.backend,
            "'local', 'threads' or 'twin'",
            "in a federation use predict",
        )
        layers = getattr(self, "own_layers_", ())
        known = "none: the parties must share their columns as they are"
        way_out = "their own layers or local models are not in these files: predict in the federation"
        require(not layers, "parties with a model of their own", ", ".join(layers), known, way_out)
        if self.columns_.matrix:
            require_matrix(X)
            X = validate_data(self, X, dtype=np.float64, reset=False)
        blocks = self.columns_.read(X)
        if blocks.shown_ids is not None:
            self.predict_ids_ = np.array(blocks.shown_ids)
        rows = [
            RowBound(bound, self.row_rule).apply(block)
            for bound, block in zip(self.row_bounds_, blocks.features, strict=True)
        ]
        return np.concatenate(rows, axis=1)

    def _logits(self, rows: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return np.asarray(GlobalModel(list(self.layers_), self.activation_).logits(rows), dtype=np.float64)

    def _own_labels(self, X: Any, y: Any) -> Any:
        """Labels to compare with: as given, or from the last party's table."""
        if y is not None and not isinstance(y, str):
            return column_or_1d(y)
        blocks = self.columns_.read(X, with_label=True)
        if blocks.labels is not None:  # as texts, and then in the type of fit: 1 in a CSV file is a text
            names = texts_of(self.classes_)
            known = dict(zip(names, self.classes_.tolist(), strict=True))
            return np.array([known.get(text, text) for text in blocks.labels])
        require(blocks.targets is not None, "y", y, "labels to compare with")
        return blocks.targets

    @property
    def coef_(self) -> npt.NDArray[np.float64]:
        """Weights of one layer: (outputs, columns), for rows within their bounds."""
        return np.asarray(self.layers_[0][:-1].T)

    @property
    def intercept_(self) -> npt.NDArray[np.float64]:
        """Intercept of one layer."""
        return np.asarray(self.layers_[0][-1])

    # shown ----------------------------------------------------------------------------------------

    @property
    def _begins(self) -> str:
        """What everything that is shown of a simulation begins with."""
        claim = getattr(self, "claim_", None)
        simulated = self.backend == "twin" if claim is None else str(claim).startswith(NO_CLAIM)
        return NO_CLAIM if simulated else ""

    def __repr__(self, N_CHAR_MAX: int = 700) -> str:
        words = super().__repr__(N_CHAR_MAX)
        return f"{self._begins}\n{words}" if self._begins else str(words)

    def _html_repr(self) -> str:
        found = super()._html_repr()
        return f"<p><b>{self._begins}</b></p>{found}" if self._begins else str(found)

    # keeping --------------------------------------------------------------------------------------

    def save(self, directory: str | Path) -> Path:
        """Write a folder: each party's model file, as ``ppvfl client`` writes it (private: it holds that party's
        schema), and this estimator's parameters."""
        from protocols.api.files import save

        check_is_fitted(self, "layers_")
        return save(self, path_of("directory", directory))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """From a folder that ``save`` wrote, or from one party's model file of ``ppvfl client``."""
        from protocols.api.files import load

        found: Self = load(cls, path_of("path", path))
        return found


def _seed(random_state: Any) -> int:
    """Seed of the order of rows, an MLP's start and a twin's noise. None: from the system's entropy, whatever numpy was
    seeded with."""
    if random_state is None:
        return secrets.randbits(128)
    if isinstance(random_state, int | np.integer):
        return int(random_state)
    known = isinstance(random_state, np.random.RandomState) or random_state is np.random
    require(known, "random_state", random_state, "a whole number, a numpy.random.RandomState, or None")
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
