"""The Python API: scikit-learn's conventions over twins, three processes of this machine, or an existing federation."""

from protocols.api.estimate import Estimate
from protocols.api.estimators import VerticalClassifier, VerticalRegressor

__all__ = ["Estimate", "VerticalClassifier", "VerticalRegressor"]
