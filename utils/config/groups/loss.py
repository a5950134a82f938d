"""Settings of the training loss."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from utils.config.field import Needs, between, group, positive, setting

LOSSES = ("cross-entropy", "bce", "focal", "asymmetric")
OF_EACH_CLASS = ("bce", "asymmetric")  # these treat each class on its own, and so take multi-label data
BALANCED = "balanced"  # --class-weights without a file

_TEACHER = Needs("--teacher")
_LABELS = Needs("a --distillation-alpha below 1", lambda v: v.teacher is None or v.distillation_alpha < 1)
_BCE = (Needs("--loss bce"), _LABELS)
_ASYMMETRIC = (Needs("--loss asymmetric"), _LABELS)
_EACH_CLASS = (Needs("--loss bce or asymmetric"), _LABELS)


def _smooths(v: Any) -> str | None:
    if v.loss not in OF_EACH_CLASS or v.bce_target_thresh is None:
        return _LABELS(v)
    does = "only moves the threshold" if v.mixup or v.cutmix else "does nothing"
    return f"{does}: --bce-target-thresh makes every target 0 or 1 again"


def _divides_targets(v: Any) -> str | None:
    if v.loss in OF_EACH_CLASS and v.bce_target_thresh is not None:
        low = v.label_smoothing / (2 if v.multilabel else v.classes)
        share = 1 - v.label_smoothing
        if not low <= v.bce_target_thresh < low + share:
            end = f"with --label-smoothing they are {low:.4g} to {low + share:.4g}"
            return f"makes every target {int(low > v.bce_target_thresh)}: {end}"
        if not (v.mixup or v.cutmix or v.label_smoothing):
            return "does nothing: it needs --mixup, --cutmix or --label-smoothing; all other targets are 0 or 1"
    return None


@group(in_evaluation=False, shapes="loss")
@dataclass(frozen=True)
class LossSettings:
    """The training loss; validation always measures cross entropy, for multi-label data of each class."""

    loss: str = setting(
        "training loss; bce: binary cross entropy of each class (the default with several labels an image), focal: "
        "less weight on what is learned well, asymmetric: bce with less weight on easy classes that are not shown",
        default="cross-entropy",
        choices=LOSSES,
        several_labels="bce",
        synonyms="criterion loss-fn",
        effect=_LABELS,
        example="bce",
    )
    label_smoothing: float = setting(
        "label smoothing",
        default=0.0,
        check=between(0, 1, open_high=True),
        synonyms="smoothing label-smoothing-factor",
        effect=_smooths,
    )
    bce_target_thresh: float | None = setting(
        "bce: targets above this, after mixing and smoothing, become 1 and the others 0, for example 0.2",
        check=between(0, 1, open_high=True),
        effect=(_divides_targets, *_EACH_CLASS),
        within="--loss bce --mixup 0.2",
    )
    bce_sum: bool = setting("bce: the sum over classes instead of their mean", default=False, effect=_EACH_CLASS)
    bce_pos_weight: float | None = setting(
        "bce: factor of the loss terms of classes that an image shows", check=positive, effect=_BCE, example="2"
    )
    asymmetric_gamma_neg: float = setting(
        "asymmetric: exponent of the factor p of classes that an image does not show, with probability p",
        default=4.0,
        effect=_ASYMMETRIC,
    )
    asymmetric_gamma_pos: float = setting(
        "asymmetric: exponent of the factor (1 - p) of classes that an image shows",
        default=0.0,
        effect=_ASYMMETRIC,
    )
    asymmetric_clip: float = setting(
        "asymmetric: subtracted from the probabilities of classes that an image does not show; lower ones count "
        "nothing",
        default=0.05,
        check=between(0, 1, open_high=True),
        effect=_ASYMMETRIC,
        example="0.2",
    )
    focal_gamma: float = setting(
        "focal: exponent of the factor (1 - p) of a class with probability p; 0 is cross entropy",
        default=2.0,
        effect=(Needs("--loss focal"), _LABELS),
    )
    class_weights: str | None = setting(
        "weights of the classes: balanced (by how rare they are), or a CSV or YAML file of names and weights; with "
        "several labels an image, of the images that show a class",
        metavar="{balanced,FILE}",
        effect=_LABELS,
        example="balanced",
    )
    teacher: str | None = setting(
        "distil from this trained network: a checkpoint, a run folder, or the name of a timm or torchvision network "
        "(downloads its pretrained weights)",
        metavar="PATH_OR_NAME",
        effect=Needs("a --distillation-alpha above 0", lambda v: v.distillation_alpha > 0),
        one_label="compares the probabilities of classes that exclude each other",
        synonyms="teacher-model teacher-path kd-model-name",
        example="teacher.pt",
    )
    distillation: str = setting(
        "compare with the teacher's probabilities (soft), or with its predictions as labels (hard)",
        default="soft",
        choices=("soft", "hard"),
        effect=_TEACHER,
        synonyms="distillation-type",
    )
    distillation_alpha: float = setting(
        "share of the teacher's loss; that of the labels has the rest",
        default=0.5,
        check=between(0, 1),
        effect=_TEACHER,
    )
    distillation_temperature: float = setting(
        "temperature of both softmaxes in soft distillation; the loss is multiplied by its square",
        default=1.0,
        check=positive,
        effect=Needs("--teacher and --distillation soft"),
        synonyms="distillation-tau kd-temperature",
    )

    @staticmethod
    def contradictions(v: Any) -> Iterator[str]:
        # a run of an earlier version, which has both, goes on
        is_asked_for = v.is_explicit("balanced_sampler") or v.is_explicit("class_weights")
        if v.has(v.balanced_sampler and v.class_weights and is_asked_for):
            yield "--balanced-sampler and --class-weights both make up for rare classes, together twice; give one"
