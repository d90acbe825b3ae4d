"""Figures against scikit-learn's, and by hand where there are few rows; the report holds them and says what it
tells."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as xml

import numpy as np
import pytest
from sklearn import metrics

from accel.errors import InvalidArgument
from vfl.evaluation import OUTSIDE, LearningCurve, evaluate_classes, evaluate_numbers, report_html, write_report


def test_two_classes_by_hand():
    found = evaluate_classes([0, 0, 1, 1], np.array([0.1, 0.6, 0.4, 0.9]), ["no", "yes"])
    assert found.confusion == ((1, 1), (1, 1)) and found.metrics["accuracy"] == 0.5
    assert found.metrics["AUC"] == 0.75 and found.metrics["F1"] == 0.5
    assert found.metrics["Brier score"] == pytest.approx((0.1**2 + 0.6**2 + 0.6**2 + 0.1**2) / 4)
    assert found.metrics["calibration error"] == pytest.approx((0.1 + 0.6 + 0.6 + 0.1) / 4)
    assert found.chance == {
        "accuracy": 0.5,
        "AUC": 0.5,
        "average precision": 0.5,
        "F1": pytest.approx(2 / 3),
        "log loss": pytest.approx(math.log(2)),
        "Brier score": 0.25,
    }


def test_the_best_constant_answer_is_one():
    """Figures of constant answers, computed as if they were a model's: none is better than what the report says."""
    random = np.random.default_rng(4)
    for count in (2, 3):
        labels, names = (
            random.choice(count, 200, p=[0.2, 0.8, 0.0][:count] if count == 2 else [0.5, 0.3, 0.2]),
            list("abc")[:count],
        )
        said = evaluate_classes(labels, np.full((200, count), 1 / count), names).chance
        always = [evaluate_classes(labels, np.eye(count)[[c] * 200], names).metrics for c in range(count)]
        shares = np.bincount(labels, minlength=count) / 200
        average = evaluate_classes(labels, np.tile(shares, (200, 1)), names).metrics
        assert said["F1"] == pytest.approx(max(found["F1"] for found in always))
        assert said["accuracy"] == pytest.approx(max(found["accuracy"] for found in always))
        assert said["Brier score"] == pytest.approx(average["Brier score"])
        assert said["log loss"] == pytest.approx(average["log loss"], rel=1e-4)


def test_two_classes_are_seen_from_the_second():
    random = np.random.default_rng(2)
    labels = (random.random(400) < 0.2).astype(int)
    share = np.clip(0.2 + 0.2 * labels + 0.1 * random.normal(size=400), 0, 1)
    found = evaluate_classes(labels, share, ["no", "yes"])
    assert found.metrics["average precision"] == pytest.approx(metrics.average_precision_score(labels, share))
    assert found.chance["average precision"] == pytest.approx(labels.mean())
    (roc,), ((name, predicted, _, rows),) = found.roc, found.calibration
    assert roc[0] == name == "yes" and sum(rows) == 400
    assert np.average(predicted, weights=rows) == pytest.approx(share.mean())


def test_many_classes_are_those_of_scikit_learn():
    random = np.random.default_rng(0)
    labels, shares = random.integers(0, 4, 300), random.dirichlet(np.ones(4), 300)
    found = evaluate_classes(labels, shares, list("abcd")).metrics
    assert found["AUC"] == pytest.approx(metrics.roc_auc_score(labels, shares, multi_class="ovr"))
    assert found["F1"] == pytest.approx(metrics.f1_score(labels, shares.argmax(axis=1), average="macro"))
    assert found["log loss"] == pytest.approx(metrics.log_loss(labels, shares), rel=1e-3)
    hot = np.eye(4)[labels]
    assert found["average precision"] == pytest.approx(metrics.average_precision_score(hot, shares))


def test_one_class_only_leaves_figures_undefined():
    found = evaluate_classes([1, 1, 1], np.array([[0.2, 0.8]] * 3), ["no", "yes"])
    assert math.isnan(found.metrics["AUC"]) and found.as_dict()["metrics"]["AUC"] is None
    assert found.roc == () and "not defined" in report_html(found)


def test_numbers():
    truth = np.array([1.0, 2.0, 3.0, 6.0])
    found = evaluate_numbers(truth, truth + np.array([0.5, -0.5, 0.5, -0.5]))
    assert found.metrics["RMSE"] == 0.5 == found.metrics["MAE"]
    assert found.metrics["R²"] == pytest.approx(1 - 1 / 14) and found.chance["R²"] == 0
    assert math.isnan(evaluate_numbers([1.0, 1.0], [1.0, 2.0]).metrics["R²"])


@pytest.mark.parametrize(
    ("labels", "shares", "sentence"),
    [
        ([0, 1], np.zeros((2, 3)), r"probabilities = \(2, 3\): must be \(2, 2\)"),
        ([0, 2], np.zeros((2, 2)), "truth"),
        ([0, 1], np.full((2, 2), np.nan), "not finite"),
        ([], np.zeros((0, 2)), "rows = 0"),
    ],
)
def test_what_does_not_fit_is_refused(labels, shares, sentence):
    with pytest.raises(InvalidArgument, match=sentence):
        evaluate_classes(labels, shares, ["no", "yes"])
    with pytest.raises(InvalidArgument, match="shape"):
        evaluate_numbers([1.0], [1.0, 2.0])


def test_the_report_is_one_page_that_fits_a_phone(tmp_path):
    random = np.random.default_rng(1)
    labels = random.integers(0, 2, 500)
    shares = np.clip(0.5 + 0.3 * (labels - 0.5) + 0.2 * random.normal(size=500), 0.01, 0.99)
    evaluation = evaluate_classes(labels, shares, ["no <b>", "yes"])
    curve = LearningCurve(tuple((step, 1 - 1 / (step + 2)) for step in range(50)), 1234, 0.6)
    file = tmp_path / "report.html"
    write_report(file, evaluation, claim="ε = 3 <claim>", non_private={"AUC": 0.987}, learning_curve=curve)
    page = file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600  # it is about private rows
    assert 'name="viewport"' in page and "max-width: 44rem" in page and "overflow-x: auto" in page
    assert (
        "<b>" not in page
        and "&lt;claim&gt;" in page
        and "http://"
        not in re.sub(
            r'xmlns[^"]*="[^"]*"',
            "",
            page.replace("http://www.w3.org", "")
            .replace("http://purl.org", "")
            .replace("http://creativecommons.org", ""),
        )
    )
    assert f"{evaluation.metrics['AUC']:.3f}" in page and "0.987" in page
    assert OUTSIDE.format(rows=500).split(".")[0] in page
    pictures = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(pictures) == 3 and "Accuracy on 1,234 public rows after each epoch" in page
    assert "F1 and the curves are those of the class yes" in page
    for picture in pictures:
        assert not {"width", "height"} & set(xml.fromstring(picture).attrib) and "viewBox" in picture[:400]
