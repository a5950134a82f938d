"""The probe and its doubts against scikit-learn, a table worked out by hand, and planted wrong labels."""

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, StratifiedKFold, cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from scripts.common import probe as module
from scripts.common.probe import STRENGTHS, doubted, fit_probe
from utils.config.settings import UserError


def clusters(count, classes=4, spread=1.6):
    """Features around a centre for each class, with columns of very different scales, and their labels."""
    generator = np.random.default_rng(0)
    centres = np.random.default_rng(99).normal(size=(classes, 12))
    labels = generator.integers(0, classes, count)
    features = (centres[labels] + spread * generator.normal(size=(count, 12))) * 10.0 ** np.linspace(-2, 2, 12)
    return features.astype(np.float32), labels


def test_strength_and_probabilities_are_those_of_scikit_learns_search_with_standardisation_inside_the_folds():
    features, labels = clusters(240)
    features[::40] *= 30  # of which a fold's own standard deviation speaks
    made = fit_probe(features, labels, 4)
    pipeline = make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000))
    folds = StratifiedKFold(5, shuffle=True, random_state=module.SEED)
    wide = features.astype(np.float64)
    search = GridSearchCV(pipeline, {"logisticregression__C": STRENGTHS}, cv=folds).fit(wide, labels)
    assert made.strength == search.best_params_["logisticregression__C"]
    # an image near the border may fall on its other side: 1 of 48 in one fold of five
    assert np.abs(np.array(list(made.scores.values())) - 100 * search.cv_results_["mean_test_score"]).max() < 0.5
    best = search.best_estimator_
    # both stop where the gradient is below 1e-4
    assert np.abs(made.probabilities(features) - best.predict_proba(wide)).max() < 0.01
    left_out = cross_val_predict(best, wide, labels, cv=folds, method="predict_proba")
    assert np.abs(made.out_of_fold - left_out).max() < 0.01
    leaked = cross_val_predict(
        LogisticRegression(C=made.strength, max_iter=2000),
        StandardScaler().fit_transform(wide),
        labels,
        cv=folds,
        method="predict_proba",
    )
    assert np.abs(made.out_of_fold - leaked).max() > 0.05  # the data tell the two apart


def test_more_images_than_the_search_takes_have_each_its_probability(monkeypatch):
    monkeypatch.setattr(module, "MOST", 100)
    features, labels = clusters(260)
    made = fit_probe(features, labels, 4)
    assert made.chosen_on == 100
    assert np.allclose(made.out_of_fold.sum(1), 1)


def test_classes_without_images_or_with_one_are_no_obstacle():
    features, labels = clusters(60, classes=3)
    labels = np.where(labels == 2, 4, labels)
    labels[0] = 3  # alone: in its own fold no probe knows it
    made = fit_probe(features, labels, 6)
    assert made.probabilities(features).shape == (60, 6)
    assert not made.probabilities(features)[:, [2, 5]].any()
    assert made.out_of_fold[0, 3] == 0


def test_groups_of_one_image_allow_as_many_folds_as_the_largest_class_has_images():
    labels = np.arange(12) % 3
    made = fit_probe(np.eye(12, dtype=np.float32), labels, 3, np.arange(12))
    assert made.folds == 4


@pytest.mark.parametrize("labels", [[0, 1, 2], [0, 1], [0, 0, 0, 0, 1]])
def test_too_few_images_for_any_fold_are_refused_in_words(labels):
    features = clusters(len(labels))[0]
    with pytest.raises(UserError, match="too few training images"):
        fit_probe(features, np.array(labels), 3)


def test_doubts_are_other_answers_and_the_confident_joints_off_its_diagonal():
    """Mean probability of their label: class 0 (0.9 + 0.8 + 0.1) / 3 = 0.6, class 1 (0.7 + 0.6 + 0.45) / 3 = 0.58."""
    shares = np.array([[0.9, 0.1], [0.8, 0.2], [0.1, 0.9], [0.3, 0.7], [0.4, 0.6], [0.55, 0.45]])
    labels = np.array([0, 0, 0, 1, 1, 1])
    found = doubted(shares, labels)
    assert found.places.tolist() == [2, 5]  # margins -0.8 and -0.1
    assert found.likely.tolist() == [1, 0]
    assert found.confident.tolist() == [True, False]  # 0.55 is below the mean of class 0


def test_planted_wrong_labels_are_found():
    """Of classes that the probe tells apart (99 %): all but one of 50 wrong labels in 1000, and few others."""
    features, labels = clusters(1000, spread=0.65)
    generator = np.random.default_rng(7)
    wrong = generator.permutation(1000)[:50]
    noisy = labels.copy()
    noisy[wrong] = (labels[wrong] + generator.integers(1, 4, 50)) % 4
    found = doubted(fit_probe(features, noisy, 4).out_of_fold, noisy)
    hits = np.isin(found.places, wrong)
    assert hits.sum() >= 48
    assert hits.mean() >= 0.8
    assert hits[:40].mean() >= 0.95  # the most doubtful come first
    assert hits[found.confident].mean() >= 0.95
    right = labels[found.places[hits]] == found.likely[hits]
    assert right.mean() >= 0.95  # and the class that is named is the true one
