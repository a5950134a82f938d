"""Every setting that shapes the result changes the bits of a run, or a line says that it does nothing."""

import contextlib
import re

import pytest
import torch
from torch import nn

import components as built
from models.small import OWN
from tests.utils.config.examples import ELSEWHERE, SHAPES_RESULT, example
from tests.utils.config.examples import context as context_of
from utils.config import arguments
from utils.config.settings import UserError
from utils.record.summary import checkpoint_description
from utils.record.writer import Writer
from utils.run import Run
from utils.runtime.distributed import Distributed, RankInfo

# 20 epochs, which the changes are made for, of one step.
BASE = "--device cpu --arch tiny --train-samples 31 --batch-size 32 --max-val-batches 2"
TEACHER = "--teacher teacher.pt"
SLOW = {"compile", "compile_mode", "compile_augment"}  # and tested to give other bits or the same where they are
CONTEXTS = {
    "plain": "",
    "bce": "--loss bce",
    "bce with a threshold": "--loss bce --bce-target-thresh 0.2",
    "focal": "--loss focal",
    "class weights": "--class-weights balanced",
    "sampler": "--balanced-sampler",
    "teacher": TEACHER,
    "teacher's labels": f"{TEACHER} --distillation hard",
    "teacher alone": f"{TEACHER} --distillation-alpha 1",
    "mixing": "--mixup 0.2 --cutmix 1",
    "mixing at once": "--mixup 0.2 --mixup-mode batch",
    "no augmentation": "--augment none",
    "policy": "--auto-augment ra",
    "average": "--ema-decay 0.9",
    "epochs' average": "--swa-start-epoch 0.75",
    "sharpness-aware": "--sam-rho 0.05",
    "penalty": "--grad-penalty 0.1",
    "lookahead": "--lookahead 6 0.5",
    "clipping": "--clip-grad-norm 1",
    "accumulation": "--accumulate 2 --batch-size 16",
    "nesterov": "--nesterov",
    "adamw": "--optimizer adamw",
    "muon": "--optimizer muon",
    "lamb": "--optimizer lamb",
    "schedule-free": "--optimizer schedulefree-sgd",
    "constant": "--lr-policy constant",
    "one-cycle": "--lr-policy one-cycle",
    "multistep": "--lr-policy multistep",
    "rate per epoch": "--lr-per-epoch --batch-size 16",
    "streaming": "--loader stream --workers 0",
    "frozen": "--freeze all-but-head",
    "frozen late": "--freeze features --freeze-epoch 5",
    "growing": "--progressive-size 4",
    "resized": "--image-size 16",
    "bf16": "--amp bf16",
    "fp16": "--amp fp16 --init-scale 1024",
    "views": "--tta flip",
}
IN_SHORT = ("plain",)
# not how they come
AS_THE_FIGURES_GO = set("early_stopping early_stopping_metric early_stopping_delta best_metric".split())


class Tiny(nn.Module):
    """Two convolutions with batch norm, and features pooled to one pixel."""

    def __init__(self, classes, channels, image_size):
        super().__init__()
        layers = (nn.Conv2d(channels, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, 2, 1))
        self.features = nn.Sequential(*layers, nn.ReLU())
        self.classifier = nn.Linear(16, classes)

    def forward(self, images):
        return self.classifier(self.features(images).mean((2, 3)))


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(OWN, "tiny", Tiny)
    save_networks()


def save_networks():
    for seed, name in enumerate(("teacher.pt", "weights.pt")):
        args = arguments.parse([*BASE.split(), "--seed", str(seed + 1)])
        with Distributed(RankInfo(), args.run) as distributed:
            components = built.build(Run(args, distributed))
        torch.save(
            {**checkpoint_description(args, components.data), "model": components.model.state_dict(), "ema": None}, name
        )


class Enough(Exception):
    """Ends a run: it has shown as many states as are wanted, or one that differs from the run to compare with."""


def outcome(line, most, other=None):
    """The state after each validation of a run, then how it ended; and its warnings. None where it is refused.

    A state: weights, average, and the validation's figures. There are at most so many; with the states of an ``other``
    run it ends at the first that is not the other's, which shows that they differ as well as the rest would.
    """
    try:
        args = arguments.parse(line.split())
        with Distributed(RankInfo(), args.run) as distributed:
            run = Run(args, distributed, writer=Writer(silent=True))
            components = built.build(run)
    except UserError:
        return None
    components.warn_of_doubts(run)
    traval = built.build_traval(run, components)
    states = []

    def note(state):
        states.append(state)
        if len(states) == most or (other is not None and other[: len(states)] != states):
            raise Enough

    def after_validation(traval, report):
        modules = [traval.model, *([traval.ema.module] if traval.ema else [])]
        tensors = [value.numpy().tobytes() for module in modules for value in module.state_dict().values()]
        note((tensors, report.loss, report.top1, report.count))

    traval.hooks.after_validation.append(after_validation)
    with contextlib.suppress(Enough):
        traval.fit()
        progress = traval.progress
        note((progress.step, progress.best_epoch, progress.best_value))
    return states, run.warnings


def settings(line):
    """What a line resolves to, or None where it is refused."""
    with contextlib.suppress(UserError):
        return arguments.parse(line.split()).values()


def judged(context, name, kept, refused):
    """What is wrong with a setting in a context, or None. Adds settings that cannot be there to ``refused``."""
    added = example(name)
    if added.split()[0] in CONTEXTS[context].split():
        return None
    base = f"{BASE} {re.sub('--arch (?!timm/test_vit)[^ ]+', '', context_of(name))} {CONTEXTS[context]}"
    resolved = settings(f"{base} {added}")
    if resolved is None:
        refused.append(name)
    if resolved in (None, settings(base)):
        return None
    for most in (1, None):  # the first epoch tells most settings from the base
        if (base, most) not in kept:
            kept[base, most] = outcome(base, most)
        before = kept[base, most]
        after = before and outcome(f"{base} {added}", most, before[0])
        if after is None:
            refused.append(name)
            return None
        if before[0] != after[0]:
            break
    lines = [line for line in after[1] if line.startswith(f"{added.split()[0]} ")]
    if before[0] == after[0]:
        return None if lines else f"{context}: {added} changes nothing, and nobody says so"
    wrong = [line for line in lines if "does nothing" in line]
    return f"{context}: {added} changes the run, and is said to do nothing: {wrong}" if wrong else None


@pytest.mark.parametrize(
    "context", [pytest.param(name, marks=() if name in IN_SHORT else pytest.mark.thorough) for name in CONTEXTS]
)
def test_every_setting_changes_the_bits_of_a_run_or_is_said_to_do_nothing(context, workplace, capsys):
    left_out = ELSEWHERE | SLOW | (AS_THE_FIGURES_GO if context != "plain" else set())
    settings = [name for name in SHAPES_RESULT if name not in left_out]
    kept = {}
    refused = []
    assert outcome(f"{BASE} {CONTEXTS[context]}", most=1), "which nothing refuses"
    assert [wrong for name in settings if (wrong := judged(context, name, kept, refused))] == []
    assert context != "plain" or refused == ["global_batch_size"], "which BASE gives as --batch-size"
