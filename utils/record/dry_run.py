"""The plan that ``--dry-run`` prints."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from utils.checkpoint.resume import ResumePoint
from utils.config.groups.data import VIEWS, DataSettings
from utils.config.groups.optimisation import RESTARTING_POLICIES, RISING_POLICIES, SCHEDULE_FREE, WITH_NESTEROV
from utils.config.settings import Settings, as_text, plan_words
from utils.optim.batch_norm_statistics import layers_with_statistics
from utils.optim.distillation import Distillation
from utils.optim.groups import lr_scales
from utils.optim.lr_policy import LRPolicy
from utils.optim.optimizers import has_momentum
from utils.precision.amp import resolve_amp
from utils.record.epoch_scalars import best_metric, selection_line
from utils.record.run_folder import RunFolder
from utils.run import Run
from utils.runtime.distributed import Distributed
from utils.runtime.exchange import exchange_words

MOST_CLASSES = 20  # whose images are counted one by one


def plan(run: Run, components: Any) -> str:
    """What ``run`` would do with these ``components``, as text of a few aligned lines.

    Every setting that shapes the result and has an effect shows in it.
    """
    args = run.args
    distributed = run.distributed
    point = run.resume_point
    folder = run.folder_to_resume
    place = f"{folder} (continues there)" if folder else f"{RunFolder.planned(args)} (not created)"
    steps = components.train_loader.steps_per_epoch
    batch = args.data
    remainder = components.train_loader.plan.remainder
    total = steps * args.optimisation.epochs
    images = f"{len(components.data.train):,} training, {validation_images(components)}"
    rows = [
        ("Data", f"{batch.dataname}: {images}{split_words(batch, components.data)}"),
        *_seen(args, components),
        ("Augmentation", _augmentation(args, components)),
        ("Mixing", _mixing(args)),
        *_sampling(components),
        *_growth(args, components),
        ("Loader", components.loader_choice),
        ("Network", _network(args, point, components)),
        *([("Stem", components.network.stem)] if components.network.stem else []),
        *_sizes(components, distributed),
        (
            "Batch",
            f"{batch.batch_size} images x {distributed.world_size} process(es) x {args.optimisation.accumulate} "
            f"forward pass(es): {batch.global_batch_size} in total" + (remainder and f", {remainder}"),
        ),
        *_exchange(args, distributed),
        ("Steps", f"{steps} an epoch x {args.optimisation.epochs} epochs = {total:,}" + _cut(args, total)),
        ("Seed", f"{args.run.seed}{', deterministic' if args.run.deterministic else ''}"),
        ("Loss", _loss(args)),
        *_teacher(args, components),
        ("Optimizer", _optimizer(args, components)),
        ("Clipping", _clipping(args)),
        ("Learning rate", _curve(args, components.lr_policy, steps, total)),
        ("Weight average", _average(args, components)),
        ("Selection", selection_line(args.run)),
        ("Precision", _precision(args, components, distributed.device)),
        ("Run folder", place),
    ]
    return _aligned(rows)


def evaluation_plan(run: Run, components: Any) -> str:
    """What ``--evaluate`` would do: those rows of ``plan`` that concern it."""
    args = run.args
    distributed = run.distributed
    point = run.resume_point
    weights = f"weights of {point.path}" if point is not None else "pretrained weights"
    rows = [
        ("Data", f"{args.data.dataname}: {validation_images(components)}"),
        *_seen(args, components),
        ("Loader", components.loader_choice),
        ("Network", f"{args.model.arch}, {weights}"),
        *([("Stem", components.network.stem)] if components.network.stem else []),
        *_sizes(components, distributed),
        ("Batch", f"{args.data.val_batch_size or args.data.batch_size} a process"),
        ("Precision", _precision(args, components, distributed.device)),
    ]
    return _aligned(rows)


def validation_images(components: Any) -> str:
    """How many there are, and of a validation that is cut, how many are used."""
    loader = components.validation_loader
    cut = f", cut to {loader.num_images:,} (--max-val-batches)" if loader.is_cut else ""
    return f"{len(components.data.validation):,} validation images{cut}"


def split_words(settings: DataSettings, data: Any) -> str:
    """How ``--val-split`` chose the validation images, and the shares that came of it; nothing without the flag."""
    if settings.val_split is None:
        return ""
    size = len(data.classes)
    kept, others = (torch.bincount(images.labels.cpu(), minlength=size) for images in (data.validation, data.train))
    shares = 100 * kept / (kept + others)
    how = {"name": "by their names", "draw": "by one draw over all"}[settings.val_split_by]
    return (
        f" (--val-split {settings.val_split:g}, {how}: {100 * kept.sum() / (kept + others).sum():.1f} % of all, "
        f"{shares.min():.1f} to {shares.max():.1f} % of a class)"
    )


def _aligned(rows: list[tuple[str, str]]) -> str:
    return "\n".join(f"{title:<14} {text}" for title, text in rows)


def _seen(args: Settings, components: Any) -> list[tuple[str, str]]:
    """What the network sees."""
    data = components.data
    return [
        ("Classes", f"{len(data.classes)}: {', '.join(data.classes[:5])}{', ...' if len(data.classes) > 5 else ''}"),
        ("Images", f"{data.spec.channels} x {data.image_size} x {data.image_size}"),
        ("Preprocessing", data.preprocessing_line),
        *([("Validation", describe_tta(args.data.tta))] if args.data.tta != "none" else ()),
    ]


def describe_tta(tta: str) -> str:
    """The line about ``--tta``, which changes what validation measures."""
    return f"Test-time augmentation {tta}: validation by the mean logits of {VIEWS[tta]} views of each image"


def _sizes(components: Any, distributed: Distributed) -> list[tuple[str, str]]:
    return [
        ("Parameters", f"{sum(p.numel() for p in components.model.parameters()):,}"),
        ("Multiply-adds", f"{multiply_adds(components.model, components.data, distributed.device):,} an image"),
        ("Processes", f"{distributed.world_size} on {distributed.describe_device()}"),
    ]


def multiply_adds(model: torch.nn.Module, data: Any, device: torch.device) -> int:
    """Multiply-adds of one image's forward pass, counted by torch (matrix products and convolutions)."""
    image = torch.zeros(1, data.spec.channels, data.image_size, data.image_size, device=device)
    counter = FlopCounterMode(display=False)
    model.eval()
    with torch.no_grad(), counter:
        model(image)
    model.train()
    return counter.get_total_flops() // 2


def _exchange(args: Settings, distributed: Distributed) -> list[tuple[str, str]]:
    """What several processes exchange, if that is not the usual."""
    text = exchange_words(args.exchange, distributed.world_size)
    return [("Exchange", text)] if text else []


def _cut(args: Settings, total: int) -> str:
    return f", cut at {args.run.max_steps:,}" if args.run.max_steps and args.run.max_steps < total else ""


def _augmentation(args: Settings, components: Any) -> str:
    names = map(str, components.train_loader.transform.augmentations)
    return (", ".join(names) or "none") + (", compiled" if args.model.compile_augment else "")


def _mixing(args: Settings) -> str:
    settings = args.augmentation
    kinds = {"mixup": settings.mixup, "cutmix": settings.cutmix}
    by_step = settings.mixup_mode == "batch"
    return _listed(kinds, " alpha ") + "".join(
        text
        for text, shown in (
            ("; drawn once a step", any(kinds.values()) and by_step),
            (f"; CutMix with probability {settings.mixup_switch_prob:g}, otherwise mixup", all(kinds.values())),
            (
                f"; {100 * settings.mixup_prob:g} % of the {'steps' if by_step else 'pairs'}",
                any(kinds.values()) and settings.mixup_prob < 1,
            ),
            (f"; off after {settings.mixup_off_epoch} epochs", any(kinds.values()) and settings.mixup_off_epoch),
        )
        if shown
    )


def _growth(args: Settings, components: Any) -> list[tuple[str, str]]:
    """The sizes of training images, if they grow."""
    resolution = components.train_loader.resolution
    return [] if resolution is None else [("Training size", resolution.table(args.optimisation.epochs))]


def _sampling(components: Any) -> list[tuple[str, str]]:
    """What an epoch consists of, unless it is every training image once."""
    sampling = components.train_loader.plan.sampling
    data = components.data
    if sampling is None:
        return []
    text = str(sampling)
    total = len(data.train)
    if len(sampling.available) < total:
        text += f"; of {len(sampling.available):,} of the {total:,} training images"
        counts = torch.bincount(data.train.labels.cpu()[sampling.available], minlength=len(data.classes)).tolist()
        if len(counts) <= MOST_CLASSES:
            text += ": " + ", ".join(f"{count:,} {name}" for name, count in zip(data.classes, counts, strict=True))
        else:
            text += f", {min(counts):,} to {max(counts):,} a class"
    return [("Sampling", text)]


def _network(args: Settings, point: ResumePoint | None, components: Any) -> str:
    model = args.model
    start = "pretrained weights" if model.pretrained else f"initialisation {model.init}"
    start = f"weights of {model.weights}" if model.weights else start
    resumes = f"; resumes from {point.path}" if point is not None else ""
    anew = f"; {components.network.untrained} begins anew" if components.network.untrained else ""
    frozen = f"; {components.network.freezing}" if components.network.freezing else ""
    built = "".join(f", {words}" for words in plan_words(model))
    return f"{model.arch}{built}, {start}{resumes}{anew}{frozen}"


def _loss(args: Settings) -> str:
    loss = args.loss
    penalty = args.optimisation.grad_penalty
    parts = {
        "label smoothing": loss.label_smoothing or None,
        "target threshold": loss.bce_target_thresh if loss.loss == "bce" else None,
        "positive weight": loss.bce_pos_weight if loss.loss == "bce" else None,
        "gamma": loss.focal_gamma if loss.loss == "focal" else None,
        "gradient penalty": penalty or None,
    }
    weights = f", class weights {loss.class_weights}" if loss.class_weights else ""
    summed = ", summed over classes" if loss.loss == "bce" and loss.bce_sum else ""
    values = "".join(f", {name} {value:g}" for name, value in parts.items() if value is not None)
    return loss.loss.replace("-", " ") + summed + weights + values


def _teacher(args: Settings, components: Any) -> list[tuple[str, str]]:
    """Its row, if there is one."""
    if not isinstance(components.criterion, Distillation):
        return []
    loss = args.loss
    temperature = f", temperature {loss.distillation_temperature:g}" if loss.distillation == "soft" else ""
    how = f"{loss.distillation} distillation, alpha {loss.distillation_alpha:g}{temperature}"
    return [("Teacher", f"{components.criterion.teacher}; {how}")]


def _optimizer(args: Settings, components: Any) -> str:
    settings = args.optimisation
    scales = lr_scales(components.optimizer)
    phrases = [settings.optimizer]
    if has_momentum(settings.optimizer):
        nesterov = " (Nesterov)" if settings.nesterov and settings.optimizer in WITH_NESTEROV else ""
        phrases.append(f"momentum {settings.momentum:g}{nesterov}")
    phrases += [] if settings.opt_eps is None else [f"eps {settings.opt_eps:g}"]
    phrases += [] if settings.opt_betas is None else [f"betas {as_text(settings.opt_betas)}"]
    phrases += settings.opt_kwargs or ()
    without = [*(settings.weight_decay_except or ()), *([] if settings.decay_norm_bias else ["norms and biases"])]
    decay = f" (not on {', '.join(without)})" if without else ""
    phrases.append(f"weight decay {settings.weight_decay:g}{decay}")
    if settings.layer_decay is not None:
        phrases.append(f"layer decay {settings.layer_decay:g} over {len(scales)} layers")
    if settings.lr_scale is not None:
        phrases.append("learning rates " + ", ".join(f"x {scale:.4g} ({name})" for name, scale in scales.items()))
    elif scales:
        phrases.append(f"learning rates x {min(scales.values()):.3g} to {max(scales.values()):.3g}")
    if settings.lookahead is not None:
        phrases.append("lookahead every {:g} steps by {:g}".format(*settings.lookahead))
    if settings.sam_rho:
        adaptive = ", adaptive" if settings.sam_adaptive else ""
        phrases.append(f"sharpness-aware (rho {settings.sam_rho:g}{adaptive}) in two passes a step")
    return ", ".join(phrases)


def _clipping(args: Settings) -> str:
    settings = args.optimisation
    return _listed(
        {"norm": settings.clip_grad_norm, "value": settings.clip_grad_value, "adaptive": settings.clip_grad_agc}, " "
    )


def _listed(components: dict[str, float | None], between: str) -> str:
    """Those of ``components`` that are on, by name and value."""
    return ", ".join(f"{name}{between}{value:g}" for name, value in components.items() if value) or "none"


def _average(args: Settings, components: Any) -> str:
    decay = args.average.ema_decay
    batches = args.average.ema_bn_batches
    first = args.average.first_averaged_epoch(args.optimisation.epochs)
    if args.optimisation.optimizer in SCHEDULE_FREE:
        kind = "that of the schedule-free optimizer"
    elif decay is not None:
        start = args.average.ema_start_epoch
        at_once = not args.average.ema_warmup
        kind = f"decay {decay:g}{' from the first step on' if at_once else ''}"
        kind += f", begun in epoch {start}" if start > 1 else ""
    elif first is not None:
        kind = f"mean of the weights after each epoch from epoch {first} on"
    else:
        return "none"
    source = f"computed over {batches} training batches before each validation" if batches else "averaged"
    return kind + (f", batch-norm statistics {source}" if layers_with_statistics(components.model) else "")


def average_and_end_lines(args: Settings, components: Any) -> list[str]:
    """The rows of ``plan`` on the average of the weights, best.pt and early stopping, if they are not the usual."""
    average = _average(args, components)
    run = args.run
    selects = run.early_stopping is not None or best_metric(run).name != "top1" or run.val_every_epochs > 1
    lines = [f"Weight average: {average}"] if average != "none" else []
    return lines + ([f"Selection: {selection_line(run)}"] if selects else [])


def _curve(args: Settings, policy: LRPolicy, steps: int, total: int) -> str:
    swa = set() if policy.swa_step is None else {policy.swa_step}
    points = sorted({*swa, 0, policy.warmup_steps, total // 4, total // 2, 3 * total // 4, total - 1})
    values = "  ".join(f"epoch {point / steps:.3g}: {policy(point):.4g}" for point in points if point < total)
    return "; ".join([f"{policy.policy}  {values}", *_schedule_words(args, policy, steps)])


def technique_lines(args: Settings, components: Any) -> list[str]:
    """The rows of ``plan`` on augmentation, loss, optimizer and learning rate, for a run's log."""
    steps = components.train_loader.steps_per_epoch
    curve = _curve(args, components.lr_policy, steps, steps * args.optimisation.epochs)
    rows = {
        "Augmentation": _augmentation(args, components),
        "Mixing": _mixing(args),
        "Loss": _loss(args),
        "Optimizer": _optimizer(args, components),
        "Clipping": _clipping(args),
        "Learning rate": curve,
    }
    return [f"{title}: {text}" for title, text in rows.items() if text != "none"]


def _schedule_words(args: Settings, policy: LRPolicy, steps: int) -> list[str]:
    """What shapes the schedule besides its name, a phrase each; ``steps``: of an epoch."""
    settings = args.optimisation
    words = []
    if settings.optimizer in SCHEDULE_FREE:
        words.append("the optimizer averages the weights instead of a schedule")
    if policy.policy == "multistep":
        words.append(f"x {policy.gamma:g} at epochs {', '.join(f'{epoch:g}' for epoch in settings.lr_milestones)}")
    if policy.policy == "step":
        words.append(f"x {policy.gamma:g} every {settings.lr_step_epochs:g} epochs")
    if policy.policy == "poly":
        words.append(f"power {policy.power:g}")
    if policy.policy in RISING_POLICIES:
        words.append(f"rises from 1/{policy.div_factor:g} of the peak over {policy.pct_start:g} of the steps")
    if policy.policy in RESTARTING_POLICIES and (restarts := policy.restarts()):
        epochs = _first_few([f"{step / steps:.3g}" for step in restarts])
        decay = f" at {policy.cycle_decay:g} of the peak before" if policy.cycle_decay < 1 else ""
        words.append(f"restarts at epochs {epochs}{decay}")
    if policy.lr_min:
        words.append(f"not below {policy.lr_min:g}")
    if settings.warmup_epochs:
        first = f" from {policy.warmup_lr:g}" if policy.warmup_lr is not None else ""
        within = "" if policy.warmup_prefix else ", in which the schedule begins"
        words.append(f"warm-up over {settings.warmup_epochs:g} epochs{first}{within}")
    if settings.lr_per_epoch:
        words.append("changes with each epoch")
    if policy.swa_step is not None:
        words.append(f"constant from epoch {policy.swa_step // steps + 1} on")
    return [*words, *filter(None, [lr_source(args)])]


def lr_source(args: Settings) -> str:
    """Where a learning rate that follows from ``--lr-base`` comes from; '' for any other."""
    settings = args.optimisation
    if settings.lr_base is None:
        return ""
    ratio = f"{args.data.global_batch_size} / {settings.lr_base_size}"
    ratio = f"sqrt({ratio})" if settings.lr_base_scale == "sqrt" else ratio
    return f"peak {settings.lr:g} = --lr-base {settings.lr_base:g} x {ratio}"


def _first_few(texts: list[str], most: int = 6) -> str:
    return ", ".join(texts[:most]) + (f" and {len(texts) - most} more" if len(texts) > most else "")


def _precision(args: Settings, components: Any, device: torch.device) -> str:
    settings = args.precision
    amp = resolve_amp(args.precision, device)
    if "amp" in args.unmeasured() and device.type == "cpu":
        return "bf16 or float32, by measurement when the run begins"
    tf32 = f", TF32 {'on' if settings.tf32 else 'off'}" if settings.tf32 is not None and device.type == "cuda" else ""
    if amp == "off":
        return f"float32 (mixed precision off){tf32}"
    scale = f", loss scale from {settings.init_scale:g}" if components.scaler.is_enabled() else ""
    layers = f", float32 in {' '.join(settings.fp32_layers)}" if settings.fp32_layers else ""
    return f"{amp}{scale}{layers}{tf32}"
