"""Doubts that a run's network has learned anything, from the figures in rows of metrics.csv.

A network that has learned nothing gives every image the same probabilities, or probabilities unrelated to its class.
Two figures would show the contrary, each in nats per image: how far the loss is below ``guessing_loss``, the loss of a
guess that knows only the classes' shares; and ``answers_nats``, the information in the answers (``nats_of``). Each is
the logarithm of a likelihood ratio against a network that has learned nothing, divided by the n images. A network whose
outputs are the same for all images gains nothing in either, whatever they are (Gibbs' inequality: the shares are those
of the counted images). If the outputs vary at random, the probabilities gain ``EVIDENCE`` = ln 10 in total with a
chance of at most 1 in 10 (Markov's inequality), the answers with a chance of about 1.6 in 100 (Wilks' theorem for one
parameter that is not negative). So the spread of the losses need not be known, few images and rare classes need no
approximation of their own, and a network that is right but far too sure (loss above guessing) is not taken for a dead
one.

All labels together hold an information of n times the guessing loss. If that is less than ``SEEN`` times what the test
needs, the test could miss a network that has learned a little, so nothing is said: with few images, with one class, or
with a rare class that has few images.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from utils.record.multilabel import AnyReport

EVIDENCE = math.log(10)  # nats
SEEN = 40  # a network that has learned a fortieth of what the labels hold would show
ROUNDING = 2e-5  # relative: of two losses in metrics.csv, which have six digits
FEW_STEPS = 20  # they show that a command works, not whether a network learns
TIMES_GUESSING = 10  # a validation loss above this many times that of guessing is worth a line
# percent
NEARLY_ALL = 95.0
HALF = 50.0
FALL = 0.01  # of the first epoch's training loss, and RISE of its top-1 in points: less does not count
RISE = 1.0
RIGHT_MOSTLY = 60.0  # percent: above, a training loss may well begin where it ends, as in fine-tuning

LOWER_LR = "a lower --lr, --warmup-epochs, --clip-grad-norm 1"
OTHERS = "a lower --lr, more --warmup-epochs or --epochs, another --init or --seed"
ADVICE = f"{OTHERS}, and labels that fit their images (scripts/check_data.py)"
OF_ANSWERS = f"{OTHERS}, labels that fit their images, and splits that are alike (scripts/check_data.py)"


class Doubt(NamedTuple):
    """A sign that a network has learned nothing, and what usually ``helps``."""

    sign: str
    helps: str

    def __str__(self) -> str:
        return f"{self.sign}; what usually helps: {self.helps}"


def doubts(rows: Sequence[Mapping[str, Any]], dataname: str) -> list[Doubt]:
    """Doubts about the network at the last validation in ``rows`` of metrics.csv.

    There are none for random labels (``synthetic``) or a validation cut short by --max-val-batches. After very few
    steps, only outputs that are not finite or are confidently wrong raise a doubt.
    """
    validated = [row for row in rows if _number(row, "val_count") > 0]
    if not validated or dataname == "synthetic" or _number(validated[-1], "max_val_batches") > 0:
        return []
    row = validated[-1]
    found = [_outputs(row)]
    if math.isfinite(_number(row, "val_loss")) and not _number(row, "step") < FEW_STEPS:
        found += [_answers(row), _training(rows, row)]
    return [doubt for doubt in found if doubt is not None]


def doubts_of(report: AnyReport, step: int | None, dataname: str) -> list[Doubt]:
    """Doubts about a network from one validation, after ``step`` steps (None if unknown)."""
    row = {"step": step, "val_loss": report.loss, "val_count": report.count, "val_top1": getattr(report, "top1", None)}
    for name in ("guessing_loss", "answers_nats", "commonest_answer"):
        row[name] = getattr(report.by_class, name, None)
    return doubts([row], dataname)


def _outputs(row: Mapping[str, Any]) -> Doubt | None:
    """A doubt about outputs that are not finite or are confidently wrong; None if there is no doubt."""
    loss = _number(row, "val_loss")
    guessing = _number(row, "guessing_loss")
    if not math.isfinite(loss):
        return Doubt(f"val_loss is {loss}{_after(row)}: the network's outputs are not finite any more", LOWER_LR)
    guessing = max(guessing, math.log(2))  # with rare classes alone, balanced training is far above their entropy
    if loss > TIMES_GUESSING * guessing:
        sign = f"val_loss {loss:.4g}{_after(row)} is more than ten times that of guessing ({guessing:.4g})"
        return Doubt(f"{sign}: the network is sure of wrong answers", LOWER_LR)
    return None


def knows_nothing(row: Mapping[str, Any]) -> bool | None:
    """True if neither probabilities nor answers tell the classes apart; None if the figures do not suffice to say."""
    names = ("val_loss", "val_count", "guessing_loss", "answers_nats")
    loss, count, guessing, answers = (_number(row, name) for name in names)
    if not guessing > 0:
        return None
    of_shares = (math.exp(guessing) - 1) / 2  # nats: fitting the shares to these images gains half a nat for each
    if count * guessing < SEEN * (EVIDENCE + of_shares):
        return None
    needed = EVIDENCE / count
    return not (guessing - loss >= needed + ROUNDING * guessing or answers >= needed)


def _answers(row: Mapping[str, Any]) -> Doubt | None:
    """A doubt about answers that tell no classes apart or are nearly always the same; None if there is no doubt."""
    nothing = knows_nothing(row)
    top1 = _number(row, "val_top1")
    most = _number(row, "commonest_answer")
    same = f"{most:.2f} % of the answers are one class"
    if nothing:
        figures = f"val_loss {_number(row, 'val_loss'):.4f} and val_top1 {top1:.2f}{_after(row)}"
        chance = f"guessing by the classes' shares (loss {_number(row, 'guessing_loss'):.4f})"
        also = f", and {same}" if most >= NEARLY_ALL else ""
        sign = f"{figures} are no better than {chance}{also}: nothing was learned that holds for these images"
        return Doubt(sign, OF_ANSWERS)
    # With top-1 below a half, that class has little more than half of the images at most.
    if nothing is False and most >= NEARLY_ALL and top1 <= HALF:
        return Doubt(f"{same}, and val_top1{_after(row)} is {top1:.2f}", OF_ANSWERS)
    return None


def _training(rows: Sequence[Mapping[str, Any]], validated: Mapping[str, Any]) -> Doubt | None:
    """A doubt about a training loss, of any kind, that has not fallen since the first epoch; None without a doubt."""
    trained = [row for row in rows if math.isfinite(_number(row, "train_loss"))]
    if len(trained) < 2:
        return None
    (before, now), (top1_before, top1) = (
        [_number(row, name) for row in (trained[0], trained[-1])] for name in ("train_loss", "train_top1")
    )
    stands = now > (1 - FALL) * before and top1 <= top1_before + RISE
    right = max(top1, _number(validated, "val_top1"))  # mixed images are harder than whole ones
    if not stands or (right >= RIGHT_MOSTLY and not knows_nothing(validated)):
        return None
    epochs = f"{int(_number(trained[0], 'epoch'))} to {int(_number(trained[-1], 'epoch'))}"
    return Doubt(f"the training loss hardly fell: {before:.4f} to {now:.4f} in epochs {epochs}", ADVICE)


def _after(row: Mapping[str, Any]) -> str:
    step = _number(row, "step")
    return f" after {int(step):,} step(s)" if math.isfinite(step) else ""


def _number(row: Mapping[str, Any], name: str) -> float:
    """The figure ``name`` of a row, where it is text or a number; NaN (every comparison is false) if it is missing."""
    value = row.get(name)
    return math.nan if value is None or value == "" else float(value)
