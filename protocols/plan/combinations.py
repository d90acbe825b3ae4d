"""Which parameters go together: everything that can be refused before rows are matched, whatever the data are.

The plan makers, the command line and ``federation.toml`` ask here, so that a run that cannot be is refused in the same
sentence wherever it is described, and before anything leaves a client.
"""

from __future__ import annotations

from typing import Any

from accel.validate import require
from vfl.hidden import activation
from vfl.methods import Facts, facts
from vfl.run_mechanism import has_secret_order
from vfl.settings import settings_of
from vfl.training import TrainingConfig

__all__ = ["refuse_combination", "refuse_measuring", "usual_task"]


def refuse_combination(protocol: str, training: TrainingConfig) -> None:
    """Raise ``InvalidArgument`` if no plan of ``protocol`` can have these parameters."""
    way_out = "its order is always secret: leave the option out, and choose how it is counted with accounting"
    require(
        not facts(protocol).takes("a new order in every epoch") or training.order == "fixed",
        "order",
        training.order,
        f"absent in {protocol}",
        way_out,
    )
    has_secret_order(protocol, training)  # refuses a secret order that there is none of
    if facts(protocol).takes("layers"):
        _refuse_for_layers(training)
        return
    require(
        not training.hidden or training.gradients == "factored",
        "gradients",
        training.gradients,
        "'factored' with hidden layers",
        "explicit gradients are the reference for one layer",
    )
    if activation(training.hidden, training.weights) == "tanh":
        no_weights = "use one layer with class weights"
        require(
            not training.class_weights, "class_weights", training.class_weights, "empty with hidden layers", no_weights
        )
    elif training.hidden or training.gradients == "explicit":
        where, way_out = "with hidden layers or explicit gradients", "use one layer with factored gradients"
        _refuse_task(training, where, way_out)
    bounded = training.loss == "bounded_softmax"
    fitting = training.task == "classification" and not training.class_weights
    way_out = (
        "class weights, one logit, regression, explicit gradients and hidden layers with secret weights have their own"
    )
    smooth = not training.hidden or activation(training.hidden, training.weights) == "tanh"
    fitting = fitting and smooth and training.gradients == "factored"
    require(fitting or not bounded, "loss", training.loss, "'softmax' but for many classes", way_out)
    for each in settings_of(TrainingConfig):
        value = getattr(training, each.name)
        possible = not each.open_weights or value == each.default or training.weights == "open"
        require(possible, each.name, value, f"{each.default!r} with secret weights", each.open_weights)
    require(
        training.noise != "joint" or training.factorisation != "bsr",
        "factorisation",
        training.factorisation,
        "bisr, toeplitz or identity with joint noise",
        "bsr filters by a recursion that rounds, and servers cannot round shares without messages",
    )


def usual_task(method: Facts, classes: int, hidden: tuple[int, ...], gradients: str) -> str:
    """What is learned of a label with so many classes where nothing is said: two are one logit wherever that can be."""
    one_layer = not hidden and gradients == "factored"
    return "binary" if classes == 2 and one_layer and method.takes("losses") else "classification"


def refuse_measuring(method: Facts, training: TrainingConfig, name: str, public: Any, patience: int) -> None:
    """Refuse public rows, given as ``name``, that cannot be measured on, and patience without them."""
    measurable = method.takes("public rows") and training.weights == "open" and training.task != "regression"
    shown = f"{public[:16]}…" if isinstance(public, str) else public
    allowed = "absent, except in a classification with g_bmf or g_shuff and open weights"
    require(measurable or not public, name, shown, allowed)
    way_out = "declare public rows: --public-fraction 0.1, in a federation `ppvfl public-rows`"
    require(bool(public) or not patience, "patience", patience, "0 without public rows", way_out)
    allowed = "0 with average = 'fifth': with early stopping the last fifth of the steps is not known"
    fifth = training.average == "fifth"
    require(not (patience and fifth), "patience", patience, allowed, "use average = 'exponential' or 'none'")


def _refuse_for_layers(training: TrainingConfig) -> None:
    require(training.hidden == (), "hidden", training.hidden, "empty: GL-BMF trains one global layer")
    require(training.noise == "distributed", "noise", training.noise, "'distributed' in GL-BMF")
    require(training.loss == "softmax", "loss", training.loss, "'softmax' in GL-BMF")
    way_out = "clients move their own layers by the sums that they receive"
    require(training.optimiser == "sgd", "optimiser", training.optimiser, "'sgd' in GL-BMF", way_out)
    _refuse_task(training, "in GL-BMF", "use g_bmf or g_shuff for one logit, regression and class weights")
    way_out = "an averaged model needs averaged client layers, and only each client has its own layer"
    require(training.average == "none", "average", training.average, "'none' in GL-BMF", way_out)


def _refuse_task(training: TrainingConfig, where: str, way_out: str) -> None:
    """Where softmax without weights is all there is."""
    require(training.task == "classification", "task", training.task, f"'classification' {where}", way_out)
    require(not training.class_weights, "class_weights", training.class_weights, f"empty {where}", way_out)
