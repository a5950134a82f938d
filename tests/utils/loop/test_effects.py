"""A setting that was given and has no effect is said so, in a line: what each needs, and who is told."""

import functools
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.faults.small_run import told
from tests.helpers import QUIETLY
from tests.utils.config.examples import OPTIONS, context, example
from utils.config import arguments
from utils.config.groups.optimisation import RESTARTING_POLICIES
from utils.config.settings import Settings, UserError, flag_of
from utils.loop.effects import without_effect
from utils.precision.amp import keep_in_fp32, never_called

SMALL = (*QUIETLY, "--arch", "fc")
# The facts of a run on several GPUs of class folders that stream, under which every setting can have an effect.
RICH = {
    "continues": False,
    "on_gpu": True,
    "precision": "fp16",
    "processes": 2,
    "local_processes": 2,
    "augmentation": ("shift", "resized-crop"),
    "classes": 10,
    "multilabel": False,
    "colour": True,
    "in_memory": False,
    "cuts_validation": True,
    "any_size": True,
    "resizes": True,
    "resident": False,
    "has_momentum": True,
    "warmup_steps": 5,
    "steps_per_epoch": 2,
    "remainder": 1,
    "layers": (SimpleNamespace(blur=1), SimpleNamespace(running_mean=1)),
    "has_filters": True,
    "gathers_statistics": True,
    "freezes_more_norms": True,
    "trains_backbone": True,
    "rates_differ": True,
    "never_called": (),
}
# For each fact, another value, and all settings whose examples have no effect then.
POORER = [
    ("continues", True, "output name"),
    ("on_gpu", False, "tf32 cuda_graph"),
    ("precision", "bf16", "init_scale max_skipped_steps"),
    ("precision", "off", "init_scale max_skipped_steps fp32_layers"),
    ("processes", 1, "timeout sync_bn shard_model grad_compression bucket_mb"),
    ("augmentation", ("flip",), "max_shift shift_padding crop_min_area"),
    ("colour", False, "grayscale_prob"),
    ("in_memory", True, "levels pixel_range decode cache_dir skip_bad_images"),
    ("cuts_validation", False, "max_val_batches"),
    ("any_size", False, "crop_mode decode"),
    ("resizes", False, "interpolation"),
    ("resident", True, "decode shard_cache"),
    ("has_momentum", False, "momentum"),
    ("warmup_steps", 0, "warmup_epochs warmup_lr warmup_prefix"),
    ("steps_per_epoch", 1, "lr_per_epoch"),
    ("remainder", 0, "drop_last"),
    ("layers", (), "blur_pool sync_bn"),
    ("has_filters", False, "channels_last"),
    ("gathers_statistics", False, "ema_bn_batches"),
    ("freezes_more_norms", False, "freeze_bn"),
    ("trains_backbone", False, "clip_grad_agc"),
    ("rates_differ", False, "layer_decay backbone_lr_scale lr_scale"),
    ("never_called", ("b",), "fp32_layers"),
]
# What depends on several facts, or on the value: flags, a part of the line, and what differs from the facts above.
NEEDS_NOT = "does nothing: it needs "
LABELS = f"{NEEDS_NOT}a --distillation-alpha below 1"
IN_MEMORY = {"in_memory": True, "resident": True}
SPECIAL = [
    ("--output D --name a --resume R", f"--name a {NEEDS_NOT}a new run: a continued one stays in", {"continues": True}),
    ("--color-jitter 0 0 0.4", "--color-jitter 0 0 0.4 does nothing: grey images have no satur", {"colour": False}),
    ("--datapath D --dataname digits", f"--datapath D {NEEDS_NOT}a --dataname with files", {"local_processes": 1}),
    ("--workers 0", f"--workers 0 {NEEDS_NOT}images in files, or --loader s", IN_MEMORY),
    (
        "--cache-dir D",
        f"{NEEDS_NOT}images in files, or several processes that share them",
        {**IN_MEMORY, "local_processes": 1},
    ),
    ("-b 8 --evaluate --pretrained --val-batch-size 9", f"--batch-size 8 {NEEDS_NOT}training, or --val-batch-size"),
    ("--global-batch-size 8 --evaluate --pretrained --val-batch-size 9", f"--global-batch-size 8 {NEEDS_NOT}train"),
    ("--pretrained --evaluate --resume R", f"--pretrained {NEEDS_NOT}no other weights to evaluate"),
    ("--mixup-off-epoch 20 --mixup 1", "--mixup-off-epoch 20 does nothing: --epochs 20 end before"),
    ("--freeze a --freeze-epoch 20", "--freeze-epoch 20 never freezes: --epochs 20 end before"),
    ("--freeze a --unfreeze-epoch 20", "--unfreeze-epoch 20 does nothing: --epochs 20 end before"),
    ("--ema-decay 0.9 --ema-start-epoch 21", "--ema-start-epoch 21 does nothing: --epochs 20 end before"),
    ("--lr-policy plateau --lr-patience 20", "keeps one rate: --epochs 20 end before --lr-patience 20"),
    ("--lr-cycle-epochs 20", "--lr-cycle-epochs 20 never restarts: --epochs 20 end before"),
    ("--lr-cycle-epochs 3 --lr-policy step", f" or {RESTARTING_POLICIES[-1]}, not step"),
    ("--lr-cycle-mul 2 --lr-cycle-epochs 5 --optimizer schedulefree-sgd", f"--lr-cycle-mul 2 {NEEDS_NOT}--lr-cycle"),
    ("--lr-policy multistep --lr-milestones 5 20 30", "does nothing at 20 and 30: --epochs 20 end before"),
    (
        "--lr-policy multistep --lr-milestones 4 5 6 --swa-start-epoch 6 --swa-lr 1",
        "at 5 and 6: --swa-lr begins before",
    ),
    (
        "--lr-cycle-epochs 3 --swa-start-epoch 4 --swa-lr 1",
        "--lr-cycle-epochs 3 never restarts: --swa-lr begins before",
    ),
    ("--lr 0.3 --swa-start-epoch 1 --swa-lr 1", "--lr 0.3 does nothing: --swa-lr is the learning rate of all epochs"),
    ("--lr-policy linear --swa-start-epoch 0.01 --swa-lr 1", "--lr-policy linear does nothing: --swa-lr is the"),
    ("--lr-min 0.02 --swa-start-epoch 1 --swa-lr 0.01", "--lr-min 0.02 does nothing: --swa-lr is the learning rate of"),
    (
        "--lr-per-epoch --swa-start-epoch 1 --swa-lr 0.01",
        f"--lr-per-epoch {NEEDS_NOT}a rate that changes within an epoch",
        {"steps_per_epoch": 16},
    ),
    ("--lookahead 41 0.5", "--lookahead 41 0.5 does nothing: the run's 40 steps end before"),
    ("--lookahead 6 1", "--lookahead 6 1 does nothing: with an ALPHA of 1"),
    (
        "--lr-per-epoch --lr-policy multistep --lr-milestones 5 10",
        f"--lr-per-epoch {NEEDS_NOT}a rate that changes within an epoch",
        {"warmup_steps": 0, "steps_per_epoch": 16},
    ),
    (
        "--warmup-epochs 0.5 --lr-per-epoch --lr-policy linear --no-warmup-prefix",
        "--warmup-epochs 0.5 does nothing: with --lr-per-epoch, a warm-up of one epoch begins at the full rate",
        {"warmup_steps": 8, "steps_per_epoch": 16},
    ),
    ("--no-decay-norm-bias --weight-decay 0", f"--no-decay-norm-bias {NEEDS_NOT}a --weight-decay above 0"),
    ("--weight-decay-except a --weight-decay 0", f"--weight-decay-except a {NEEDS_NOT}a --weight-decay above 0"),
    ("--momentum 0.9 --optimizer lion", "0.9 does nothing: --optimizer lion has no", {"has_momentum": False}),
    ("--lr-min 0.01 --lr-policy constant", "--lr-min 0.01 does nothing: --lr-policy constant never falls"),
    ("--warmup-epochs 0.01", f"--warmup-epochs 0.01 {NEEDS_NOT}to be at least half a step", {"warmup_steps": 0}),
    ("--no-warmup-prefix --lr-policy step", f"{NEEDS_NOT}--warmup-epochs and --lr-policy cosine or gaussian"),
    ("--lr-per-epoch --lr-policy constant", f"--lr-per-epoch {NEEDS_NOT}a rate that changes", {"warmup_steps": 0}),
    ("--bce-target-thresh 0.2 --loss bce", f"{NEEDS_NOT}--mixup, --cutmix or --label-smoothing; all other"),
    ("--bce-target-thresh 0 --label-smoothing 0.1 --loss bce", "makes every target 1: with --label-smoothing"),
    ("--bce-target-thresh 0.95 --label-smoothing 0.1 --loss bce", "makes every target 0: with --label-smoothing"),
    ("--label-smoothing 0.1 --loss bce --bce-target-thresh 0.2", "0.1 does nothing: --bce-target-thresh makes"),
    ("--label-smoothing 0.1 --loss bce --bce-target-thresh 0.2 --mixup 0.2", "0.1 only moves the threshold: --bce"),
    ("--loss bce --teacher T --distillation-alpha 1", f"--loss bce {LABELS}"),
    ("--label-smoothing 0.1 --teacher T --distillation-alpha 1", f"--label-smoothing 0.1 {LABELS}"),
    ("--class-weights balanced --teacher T --distillation-alpha 1", f"--class-weights balanced {LABELS}"),
    ("--bce-sum --loss bce --teacher T --distillation-alpha 1", f"--bce-sum {LABELS}"),
    ("--teacher T --distillation-alpha 0", f"--teacher T {NEEDS_NOT}a --distillation-alpha above 0"),
    ("--teacher T --distillation hard --distillation-temperature 3", f"{NEEDS_NOT}--teacher and --distillation soft"),
    ("--ema-bn-batches 4", f"{NEEDS_NOT}--ema-decay or --swa-start-epoch or a schedule-free optimizer, and batch"),
    (
        "--fp32-layers a b",
        "does nothing for b, which the network never calls; name the layers",
        {"never_called": ("b",)},
    ),
    ("--init-scale 65536", f"--init-scale 65536 {NEEDS_NOT}--amp fp16", {"precision": "off"}),
]


@functools.cache
def parsed(line):
    return arguments.parse(line.split())


def lines_of(line, **changes):
    return without_effect(parsed(line), RICH | changes)


def lines_about(name, line, **changes):
    return [found for found in lines_of(line, **changes) if found.startswith(f"{example(name)} ")]


@pytest.mark.parametrize(("fact", "value", "names"), POORER)
def test_each_fact_is_needed_by_these_settings_and_by_no_other(fact, value, names):
    told_of = {name for name in OPTIONS if lines_about(name, f"{context(name)} {example(name)}", **{fact: value})}
    assert told_of == set(names.split()), (
        f"POORER names, for each fact, all settings that it leaves without effect: correct the line of {fact}. If a new "
        "setting is in all of these failures, RICH lacks what it needs"
    )


def test_the_table_above_holds_every_fact_that_a_setting_alone_can_need():
    assert {fact for fact, *_ in POORER} == set(RICH) - {"classes", "local_processes", "multilabel"}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_setting_with_what_it_needs_is_not_told_and_without_a_flag_that_it_needs_it_is(name):
    assert lines_about(name, f"{context(name)} {example(name)}") == []
    for effect in OPTIONS[name].metadata["effect"]:
        if getattr(effect, "is_of_flags", False) and not effect.holds(SimpleNamespace(**Settings().values())):
            try:
                assert lines_about(name, example(name))[0].startswith(f"{example(name)} {NEEDS_NOT}{effect.words}")
            except UserError as error:  # without that flag the setting contradicts another
                assert flag_of(name) in str(error)


@pytest.mark.parametrize(("line", "words", "changes"), [(*case, {})[:3] for case in SPECIAL])
def test_a_setting_without_what_it_needs_is_told_in_one_line(line, words, changes):
    told_of = [found for found in lines_of(line, **changes) if words in found]
    assert len(told_of) == 1 and "\n" not in told_of[0], f"one of these has {words!r}: {lines_of(line, **changes)}"


def test_a_new_folder_is_made_by_a_run_that_auto_begins_and_a_batch_without_one_for_validation_is_used():
    assert lines_of("--output D --name a --resume auto", continues=True) == []
    assert lines_of("-b 8 --evaluate --pretrained") == []


@pytest.mark.parametrize(
    "policy",
    [
        "multistep --lr-milestones 5 10.5",
        "step --lr-step-epochs 2.5",
        "cosine --warmup-epochs 0.5",
        "multistep --warmup-epochs 2",
    ],
)
def test_a_rate_that_changes_within_an_epoch_is_held_for_it(policy):
    facts = {"warmup_steps": 32 * ("warmup" in policy), "steps_per_epoch": 16}
    assert lines_of(f"--lr-per-epoch --lr-policy {policy}", **facts) == []


def test_settings_and_facts_do_not_share_a_name():
    assert not set(Settings().values()) & set(RICH)


def test_what_is_given_as_off_asks_for_nothing():
    assert lines_of("--no-tf32 --warmup-epochs 0 --no-nesterov", on_gpu=False, warmup_steps=0) == []


# ------------------------------------------------------------------------------------------ who is told


def test_a_recipe_is_told_of_what_it_sets_otherwise_than_the_default(recipe):
    path = recipe("lr-gamma: 0.5\nmomentum: 0.9\noptimizer: lion\ninit-scale: 4\n")
    assert lines_of(f"--config {path}", has_momentum=False, precision="off") == [
        f"recipe {path}: lr-gamma: 0.5 does nothing: it needs --lr-policy multistep or step or plateau",
        f"recipe {path}: init-scale: 4 does nothing: it needs --amp fp16",
    ]


def test_the_saved_configuration_of_a_run_has_nothing_to_be_told(recipe):
    saved = recipe(arguments.as_recipe(arguments.parse(["--optimizer", "lion"]), "main.py"))
    assert lines_of(f"--config {saved}", has_momentum=False, precision="off", on_gpu=False, augmentation=()) == []


def test_a_checkpoints_settings_are_not_told():
    args = arguments.parse([], 1, {"lr_gamma": 0.5, "init_scale": 4.0})
    assert without_effect(args, RICH | {"precision": "off"}) == []


def test_a_flag_wins_over_what_the_recipe_sets_for_another_choice(recipe):
    path = recipe("lr-policy: multistep\nlr-milestones: [3, 6]\nlr-gamma: 0.2\nnesterov: true\n")
    assert lines_of(f"--config {path} --lr-policy cosine --optimizer adamw") == [
        f"recipe {path}: nesterov: true does nothing: it needs --optimizer sgd or muon-sgd",
        f"recipe {path}: lr-milestones: 3 6 does nothing: it needs --lr-policy multistep, not cosine",
        f"recipe {path}: lr-gamma: 0.2 does nothing: it needs --lr-policy multistep or step or plateau",
    ]
    for line in ("--lr-milestones 3 6", "--nesterov --optimizer adamw"):
        with pytest.raises(UserError):
            arguments.parse(line.split())
    with pytest.raises(UserError):
        arguments.parse(["--config", recipe("lr-milestones: [3, 6]\n")])


def test_evaluation_is_told_of_each_flag_that_only_trains_and_not_of_its_recipe(recipe):
    path = recipe("lr: 0.3\nmixup: 0.2\nsave-every-steps: 5\nworkers: 0\n")
    flags = f"--config {path} --evaluate --pretrained --epochs 3 --cutout 2 --seed 4 --print-freq 5 --val-batch-size 7"
    assert lines_of(flags) == [
        f"{flag} does nothing with --evaluate" for flag in ("--seed 4", "--cutout 2", "--epochs 3", "--print-freq 5")
    ]


# ---------------------------------------------------------------------------------- layers never called


class Listed(nn.Module):
    """Calls the layers of a list and not the list, one layer in training alone, and uses another's weights."""

    def __init__(self):
        super().__init__()
        self.flat = nn.Flatten()
        self.norm = nn.BatchNorm2d(1)
        self.layers = nn.ModuleList([nn.Linear(64, 8), nn.Linear(8, 8)])
        self.helper = nn.Linear(8, 8)
        self.used = nn.Linear(8, 10)
        self.spare = nn.Identity()

    def forward(self, images):
        x = self.flat(self.norm(images))
        for layer in self.layers:
            x = layer(x)
        if self.training:
            x = x + self.helper(x)
        return nn.functional.linear(x, self.used.weight, self.used.bias)


@pytest.mark.parametrize(
    ("training", "expected"), [(True, ("layers", "used", "spare")), (False, ("layers", "helper", "used", "spare"))]
)
def test_layers_whose_forward_is_never_called_are_found_without_touching_the_network(training, expected):
    model = Listed()
    names = ["layers", "layers.0", "layers.1", "helper", "used", "spare", "norm"]
    keep_in_fp32(model, names, torch.device("cpu"))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert never_called(model, names, (1, 8, 8), torch.device("cpu"), training) == expected
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training and not model.layers[0]._forward_pre_hooks


# -------------------------------------------------------------------------------------------- real runs


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--optimizer muon --momentum 0.5 --arch conv2", "--momentum 0.5 does nothing: --optimizer muon has none"),
        ("--init-scale 1024", "--init-scale 1024 does nothing: it needs --amp fp16"),
        (
            "--dataname synthetic --image-size 8 --max-shift 2",
            "--max-shift 2 does nothing: it needs shift in --augment",
        ),
        ("--tf32", "--tf32 does nothing: it needs a GPU"),
        ("--channels-last", "--channels-last on does nothing: it needs a network with convolutions"),
        ("--amp off --fp32-layers layers", "--fp32-layers layers does nothing: it needs --amp fp16 or bf16"),
        ("--workers 2", "--workers 2 does nothing: it needs images in files, or --loader stream"),
    ],
)
def test_dry_run_tells_what_has_no_effect_and_shows_the_plan(line, words, workplace, capsys):
    code, lines = told(capsys, (*SMALL, "--dry-run", *line.split()))
    assert (code, lines) == (0, [f"main.py: warning: {words}"])


def test_a_run_tells_on_the_console_and_in_its_log(workplace, capsys):
    code, lines = told(capsys, (*SMALL, "--max-steps", 1, "--lr-gamma", 0.5, "--tf32"))
    (run,) = (workplace / "runs/digits/fc").iterdir()
    logged = [line[20:] for line in (run / "log.txt").read_text().splitlines() if "warning" in line]
    assert code == 0 and len(lines) == 2 and [f"main.py: {line}" for line in logged] == lines
