"""``import ppvfl`` is what users import: a name that goes, or comes, is a decision and not an accident of a move."""

from __future__ import annotations

import subprocess
import sys

import pytest

import ppvfl
import refmpc
from protocols.api import VerticalClassifier


def test_the_public_face_has_these_names():
    assert ppvfl.__all__ == ["Estimate", "VerticalClassifier", "VerticalRegressor", "__version__", "refmpc"]
    assert dir(ppvfl) == sorted(ppvfl.__all__)
    assert ppvfl.VerticalClassifier is VerticalClassifier and ppvfl.refmpc is refmpc
    assert ppvfl.Estimate.__name__ == "Estimate" and ppvfl.VerticalRegressor().protocol == "g_bmf"
    assert ppvfl.__version__[0].isdigit()


def test_a_name_that_is_not_there_is_told_with_those_that_are():
    with pytest.raises(AttributeError, match="no attribute 'VerticalCluster'; it exports Estimate, VerticalClassifier"):
        ppvfl.VerticalCluster  # noqa: B018


def test_importing_ppvfl_imports_nothing_heavy():
    words = "import sys, ppvfl; assert not {'numpy', 'refmpc', 'protocols', 'sklearn'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", words], check=True, timeout=60)
