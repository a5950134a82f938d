"""Which name the user meant: what other programs call our settings first, then the nearest spelling."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# Our flags, with their names in timm's train.py, torchvision's references, PyTorch's ImageNet example, Lightning's
# Trainer and callbacks, and many scripts.
_ELSEWHERE = {
    "config": "c",
    "output": "output-dir out-dir save-dir work-dir log-dir logdir default-root-dir",
    "name": "experiment run-name exp-name",
    "seed": "manual-seed random-seed seed-everything",
    "deterministic": "use-deterministic-algorithms",
    "device": "accelerator",
    "device cpu": "no-cuda",
    "gpu-ids": "gpu gpus",
    "resume": "ckpt-path resume-from-checkpoint",
    "evaluate": "eval test-only validate",
    "max-steps": "fast-dev-run",
    "val-every-epochs": "val-interval check-val-every-n-epoch eval-freq eval-interval validate-every",
    "dataname": "dataset dataset-name",
    "dataname synthetic": "dummy",
    "datapath": "data data-dir data-path data-root root dataset-dir",
    "download": "dataset-download",
    "image-size": "img-size input-size train-crop-size resolution",
    "val-image-size": "val-crop-size val-img-size eval-crop-size",
    "progressive-size": "min-res",
    "blur-pool": "use-blurpool blurpool",
    "workers": "j num-workers",
    "batch-size": "train-batch-size per-device-train-batch-size per-gpu-batch-size bs",
    "val-batch-size": "validation-batch-size vb eval-batch-size test-batch-size per-device-eval-batch-size",
    "auto-augment": "aa autoaugment",
    "augment none": "no-aug",
    "augment flip": "hflip",
    "augment vertical-flip": "vflip",
    "random-erase": "reprob random-erasing",
    "random-erase-mode": "remode",
    "random-erase-count": "recount",
    "mixup": "mixup-alpha",
    "cutmix": "cutmix-alpha",
    "repeated-augmentation": "aug-repeats ra-sampler ra-reps repeated-aug",
    "train-samples": "limit-train-batches max-train-samples",
    "arch": "model model-name network net backbone",
    "weights": "initial-checkpoint pretrained-path",
    "compile": "torchcompile torch-compile",
    "epochs": "max-epochs num-epochs n-epochs num-train-epochs",
    "optimizer": "opt optim",
    "lr": "learning-rate base-lr init-lr",
    "lr-min": "min-lr eta-min",
    "weight-decay": "wd",
    "no-decay-norm-bias": "norm-weight-decay bias-weight-decay",
    "loss": "criterion loss-fn",
    "loss bce": "bce-loss",
    "teacher": "teacher-model teacher-path kd-model-name",
    "distillation": "distillation-type",
    "distillation-temperature": "distillation-tau kd-temperature",
    "label-smoothing": "smoothing",
    "lr-policy": "sched scheduler lr-scheduler lr-schedule",
    "lr-milestones": "decay-milestones milestones schedule",
    "lr-step-epochs": "decay-epochs lr-step-size step-size",
    "lr-cycle-epochs": "t-initial t-0",
    "lr-cycle-mul": "t-mult",
    "lr-gamma": "decay-rate dr gamma",
    "warmup-epochs": "lr-warmup-epochs warmup",
    "warmup-lr": "warmup-lr-init warmup-start-lr",
    "no-lr-per-epoch": "sched-on-updates",
    "accumulate": "grad-accum-steps accumulate-grad-batches gradient-accumulation-steps",
    "clip-grad-norm": "clip-grad gradient-clip-val max-grad-norm",
    "ema-decay": "model-ema model-ema-decay",
    "ema-warmup": "model-ema-warmup",
    "amp": "amp-dtype precision mixed-precision",
    "amp off": "no-amp",
    "init-scale": "loss-scale",
    "grad-compression": "gradient-compression fp16-compression bf16-compression comm-hook ddp-comm-hook",
    "bucket-mb": "bucket-cap-mb bucket-size ddp-bucket-cap-mb",
    "print-freq": "p log-interval log-every-n-steps log-freq",
    "progress": "enable-progress-bar",
    "save-every-epochs": "every-n-epochs save-freq",
    "save-every-steps": "recovery-interval every-n-train-steps save-steps",
}
FLAG_OF = {name: flag for flag, names in _ELSEWHERE.items() for name in names.split()}
_VALUES = {
    "gpu": "cuda", "float16": "fp16", "half": "fp16", "16": "fp16", "16-mixed": "fp16", "bfloat16": "bf16",
    "bf16-mixed": "bf16", "float32": "off", "fp32": "off", "32": "off", "none": "off", "steplr": "step",
    "onecycle": "one-cycle", "polynomial": "poly",
    "imagefolder": "folder", "image-folder": "folder", "hflip": "flip", "vflip": "vertical-flip", "rrc": "resized-crop",
}  # fmt: skip
SHORTEST_PREFIX, MOST_SHOWN = 3, 3


def meant(name: str, known: Iterable[str]) -> str:
    """`` (did you mean ...?)`` with the setting in ``known`` that the user meant by ``name``; '' for none.

    ``known`` are flags, or a recipe's keys with underscores, which the answer spells as ``name`` does.
    """
    known, elsewhere = list(known), FLAG_OF.get(_key(name))
    if any(candidate.startswith("-") for candidate in known):
        positive = [candidate for candidate in known if not candidate.startswith("--no-")]
        flags = [f"--{elsewhere}"] if elsewhere else _nearest(name, positive)
        return _did_you_mean(flags or difflib.get_close_matches(name, known, n=1, cutoff=0.6))
    keys = [elsewhere.partition(" ")[0].removeprefix("no-")] if elsewhere else _nearest(name, known)
    keys = keys or difflib.get_close_matches(_key(name).replace("-", "_"), known, n=1, cutoff=0.6)
    dashes = "_" not in name
    return _did_you_mean([key.replace("_", "-") if dashes else key.replace("-", "_") for key in keys])


def meant_value(value: str, known: Iterable[str]) -> str:
    """The same for a value and its choices."""
    known = list(known)
    if _VALUES.get(_key(value)) in known:
        return _did_you_mean([_VALUES[_key(value)]])
    return _did_you_mean(_nearest(value, known) or difflib.get_close_matches(value, known, n=1, cutoff=0.6))


def _did_you_mean(names: list[str]) -> str:
    return f" (did you mean {' or '.join(filter(None, (', '.join(names[:-1]), names[-1])))}?)" if names else ""


def _nearest(name: str, known: list[str]) -> list[str]:
    """The name with the same letters, otherwise the few that begin with them."""
    key = _key(name)
    same = [candidate for candidate in known if _key(candidate).replace("-", "") == key.replace("-", "")]
    longer = [candidate for candidate in known if len(key) >= SHORTEST_PREFIX and _key(candidate).startswith(key)]
    return same[:1] or (longer if len(longer) <= MOST_SHOWN else [])


def _key(name: str) -> str:
    return name.lstrip("-").lower().replace("_", "-")
