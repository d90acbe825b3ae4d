"""``import vfl`` has what a study in the clear needs, and points to the estimators."""

from __future__ import annotations

import pytest

import vfl


def test_every_public_name_is_there():
    for name in vfl.__all__:
        assert getattr(vfl, name).__module__.startswith("vfl.")
    assert vfl.TrainingConfig(epochs=2).epochs == 2
    with pytest.raises(AttributeError, match="no attribute 'VerticalClassifier'; estimators are in `protocols`"):
        vfl.VerticalClassifier  # noqa: B018
