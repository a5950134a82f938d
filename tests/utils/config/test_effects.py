"""A setting that was given and has no effect is said so, in a line: what each needs, and who is told."""

import pytest
import torch
from torch import nn

from tests.faults.small_run import told
from utils.config import arguments
from utils.config.effects import Facts, without_effect
from utils.config.settings import Settings, UserError, all_settings
from utils.precision.amp import keep_in_fp32, never_called

SMALL = ("--device", "cpu", "--arch", "fc", "--no-progress")
# The facts of a run on several GPUs of class folders that stream, under which every setting can have an effect.
RICH = Facts(
    continues=False,
    on_gpu=True,
    precision="fp16",
    processes=2,
    local_processes=2,
    augmentation=("shift",),
    classes=10,
    colour=True,
    in_memory=False,
    cuts_validation=True,
    any_size=True,
    resizes=True,
    resident=False,
    has_momentum=True,
    warmup_steps=5,
    remainder=1,
    has_filters=True,
    blurs=True,
    has_statistics=True,
    gathers_statistics=True,
    freezes_more_norms=True,
    trains_backbone=True,
    rates_differ=True,
    trains_products=True,
    never_called=(),
)
FILES = "--dataname folder --datapath D"

# For each setting that needs something: flags, what is different from the facts above, and the end of the line.
NEEDS = [
    ("output", "--output D --resume R", {"continues": True}, "--output D does nothing: it needs a new run"),
    ("name", "--name a --resume R", {"continues": True}, "--name a does nothing: it needs a new run"),
    (
        "color_jitter",
        "--color-jitter 0 0 0.4",
        {"colour": False},
        "--color-jitter 0 0 0.4 does nothing: grey images have no",
    ),
    (
        "color_jitter_prob",
        "--color-jitter-prob 0.4",
        {},
        "--color-jitter-prob 0.4 does nothing: it needs --color-jitter",
    ),
    ("grayscale_prob", "--grayscale-prob 0.4", {"colour": False}, "--grayscale-prob 0.4 does nothing: it needs colour"),
    (
        "random_erase_mode",
        "--random-erase-mode rand",
        {},
        "--random-erase-mode rand does nothing: it needs --random-erase",
    ),
    (
        "random_erase_count",
        "--random-erase-count 2",
        {},
        "--random-erase-count 2 does nothing: it needs --random-erase",
    ),
    ("timeout", "--timeout 5", {"processes": 1}, "--timeout 5 does nothing: it needs several processes"),
    ("val_split_by", "--val-split-by draw", {}, "--val-split-by draw does nothing: it needs --val-split"),
    ("datapath", "--dataname digits --datapath D", {"local_processes": 1}, "--datapath D does nothing: it needs"),
    (
        "workers",
        "--workers 0",
        {"in_memory": True, "resident": True},
        "--workers 0 does nothing: it needs images in files",
    ),
    ("decode", "--decode gpu", {"any_size": False}, "--decode gpu does nothing: it needs image files of any size that"),
    ("decode", "--decode gpu --loader resident", {"resident": True}, "--decode gpu does nothing: it needs"),
    ("decode", "--decode gpu", {"in_memory": True}, "--decode gpu does nothing: it needs image files"),
    ("cache_dir", "--cache-dir D", {"in_memory": True}, "--cache-dir D does nothing: it needs images in files"),
    (
        "cache_dir",
        "--cache-dir D",
        {"resident": True, "in_memory": True, "local_processes": 1},
        "--cache-dir D does nothing: it needs images in files, or several processes that share them",
    ),
    (
        "max_val_batches",
        "--max-val-batches 9",
        {"cuts_validation": False},
        "--max-val-batches 9 does nothing: it needs more validation images",
    ),
    ("skip_bad_images", "--skip-bad-images", {"in_memory": True}, "--skip-bad-images does nothing: it needs images in"),
    (
        "batch_size",
        "-b 8 --evaluate --pretrained --val-batch-size 9",
        {},
        "--batch-size 8 does nothing: it needs training",
    ),
    (
        "global_batch_size",
        "--global-batch-size 8 --evaluate --pretrained --val-batch-size 9",
        {},
        "--global-batch-size 8 does nothing: it needs training",
    ),
    ("image_column", "--image-column a", {}, "--image-column a does nothing: it needs --dataname hf"),
    (
        "pixel_range",
        "--pixel-range 0 9",
        {"in_memory": True},
        "--pixel-range 0 9 does nothing: it needs images in files",
    ),
    ("label_column", "--label-column a", {}, "--label-column a does nothing: it needs --dataname hf"),
    (
        "shard_cache",
        "--shard-cache D",
        {"resident": True},
        "--shard-cache D does nothing: it needs images in shards that",
    ),
    ("shard_cache_gb", "--shard-cache-gb 9", {}, "--shard-cache-gb 9 does nothing: it needs --shard-cache"),
    ("crop_mode", "--crop-mode squash", {"any_size": False}, "--crop-mode squash does nothing: it needs images of any"),
    (
        "interpolation",
        "--interpolation bicubic",
        {"resizes": False},
        "--interpolation bicubic does nothing: it needs images",
    ),
    (
        "max_shift",
        "--max-shift 2",
        {"augmentation": ("flip",)},
        "--max-shift 2 does nothing: it needs shift in --augment",
    ),
    (
        "crop_min_area",
        "--crop-min-area 0.35",
        {"augmentation": ("flip",)},
        "does nothing: it needs resized-crop in --augm",
    ),
    (
        "shift_padding",
        "--shift-padding reflect",
        {"augmentation": ()},
        "--shift-padding reflect does nothing: it needs shift",
    ),
    ("mixup_mode", "--mixup-mode batch", {}, "--mixup-mode batch does nothing: it needs --mixup or --cutmix"),
    ("mixup_prob", "--mixup-prob 0.5", {}, "--mixup-prob 0.5 does nothing: it needs --mixup or --cutmix"),
    ("mixup_switch_prob", "--mixup-switch-prob 0 --mixup 1", {}, "does nothing: it needs both --mixup and --cutmix"),
    ("mixup_off_epoch", "--mixup-off-epoch 3", {}, "--mixup-off-epoch 3 does nothing: it needs --mixup or --cutmix"),
    (
        "mixup_off_epoch",
        "--mixup-off-epoch 20 --mixup 1",
        {},
        "--mixup-off-epoch 20 does nothing: --epochs 20 end before",
    ),
    ("progressive_step", "--progressive-step 4", {}, "--progressive-step 4 does nothing: it needs --progressive-size"),
    (
        "progressive_epochs",
        "--progressive-epochs 1 2",
        {},
        "--progressive-epochs 1 2 does nothing: it needs --progressive-size",
    ),
    ("pretrained", "--pretrained --evaluate --resume R", {}, "--pretrained does nothing: it needs no other weights"),
    ("new_head", "--new-head", {}, "--new-head does nothing: it needs --weights or --pretrained"),
    ("freeze_epoch", "--freeze-epoch 2", {}, "--freeze-epoch 2 does nothing: it needs --freeze"),
    ("freeze_epoch", "--freeze a --freeze-epoch 20", {}, "--freeze-epoch 20 never freezes: --epochs 20 end before"),
    ("unfreeze_epoch", "--unfreeze-epoch 2", {}, "--unfreeze-epoch 2 does nothing: it needs --freeze"),
    (
        "unfreeze_epoch",
        "--freeze a --unfreeze-epoch 20",
        {},
        "--unfreeze-epoch 20 does nothing: --epochs 20 end before",
    ),
    ("shard_model", "--shard-model", {"processes": 1}, "--shard-model does nothing: it needs several processes"),
    ("sync_bn", "--sync-bn", {"processes": 1}, "--sync-bn does nothing: it needs several processes, and batch norm"),
    (
        "layer_decay",
        "--layer-decay 0.5",
        {"rates_differ": False},
        "--layer-decay 0.5 does nothing: it needs to change the",
    ),
    (
        "backbone_lr_scale",
        "--backbone-lr-scale 0.5",
        {"rates_differ": False},
        "--backbone-lr-scale 0.5 does nothing: it",
    ),
    (
        "lr_scale",
        "--lr-scale a=2",
        {"rates_differ": False},
        "--lr-scale a=2 does nothing: it needs to change the rate of",
    ),
    (
        "clip_grad_agc",
        "--clip-grad-agc 0.1",
        {"trains_backbone": False},
        "--clip-grad-agc 0.1 does nothing: it needs more",
    ),
    (
        "matmul_weight_grad",
        "--matmul-weight-grad a",
        {"trains_products": False},
        "--matmul-weight-grad a does nothing: it",
    ),
    ("freeze_bn", "--freeze-bn", {"freezes_more_norms": False}, "--freeze-bn does nothing: it needs batch norm with"),
    (
        "channels_last",
        "--channels-last",
        {"has_filters": False},
        "--channels-last on does nothing: it needs a network with",
    ),
    (
        "momentum",
        "--momentum 0.9 --optimizer lion",
        {"has_momentum": False},
        "--momentum 0.9 does nothing: --optimizer lion",
    ),
    (
        "decay_norm_bias",
        "--no-decay-norm-bias --weight-decay 0",
        {},
        "--no-decay-norm-bias does nothing: it needs a --weight",
    ),
    (
        "lr_milestones",
        "--lr-policy multistep --lr-milestones 5 20 30",
        {},
        "does nothing at 20 and 30: --epochs 20 end before",
    ),
    ("lr_gamma", "--lr-gamma 0.5", {}, "--lr-gamma 0.5 does nothing: it needs --lr-policy multistep or step"),
    ("lr_base_size", "--lr-base-size 64", {}, "--lr-base-size 64 does nothing: it needs --lr-base"),
    ("lr_base_scale", "--lr-base-scale sqrt", {}, "--lr-base-scale sqrt does nothing: it needs --lr-base"),
    (
        "lr_min",
        "--lr-min 0.01 --lr-policy constant",
        {},
        "--lr-min 0.01 does nothing: --lr-policy constant never falls",
    ),
    ("lr_step_epochs", "--lr-step-epochs 3", {}, "--lr-step-epochs 3 does nothing: it needs --lr-policy step"),
    ("lr_power", "--lr-power 3", {}, "--lr-power 3 does nothing: it needs --lr-policy poly"),
    (
        "lr_cycle_epochs",
        "--lr-cycle-epochs 3 --lr-policy step",
        {},
        "--lr-cycle-epochs 3 does nothing: it needs --lr-policy",
    ),
    ("lr_cycle_epochs", "--lr-cycle-epochs 20", {}, "--lr-cycle-epochs 20 never restarts: --epochs 20 end before"),
    ("lr_cycle_mul", "--lr-cycle-mul 2", {}, "--lr-cycle-mul 2 does nothing: it needs --lr-cycle-epochs"),
    (
        "lr_cycle_mul",
        "--lr-cycle-mul 2 --lr-cycle-epochs 5 --optimizer schedulefree-sgd",
        {},
        "--lr-cycle-mul 2 does nothing: it needs --lr-cycle-epochs and --lr-policy cosine or",
    ),
    ("lr_cycle_decay", "--lr-cycle-decay 0.5", {}, "--lr-cycle-decay 0.5 does nothing: it needs --lr-cycle-epochs"),
    ("lr_pct_start", "--lr-pct-start 0.2", {}, "does nothing: it needs --lr-policy one-cycle or triangular"),
    ("lr_div_factor", "--lr-div-factor 2", {}, "does nothing: it needs --lr-policy one-cycle or triangular"),
    (
        "warmup_epochs",
        "--warmup-epochs 0.01",
        {"warmup_steps": 0},
        "--warmup-epochs 0.01 does nothing: it needs to be at least half a step",
    ),
    (
        "warmup_epochs",
        "--warmup-epochs 1 --lr-per-epoch",
        {},
        "does nothing: with --lr-per-epoch, a warm-up of one epoch",
    ),
    ("warmup_lr", "--warmup-lr 0.01", {"warmup_steps": 0}, "--warmup-lr 0.01 does nothing: it needs --warmup-epochs"),
    (
        "warmup_prefix",
        "--no-warmup-prefix",
        {"warmup_steps": 0},
        "--no-warmup-prefix does nothing: it needs --warmup-epochs",
    ),
    (
        "warmup_prefix",
        "--no-warmup-prefix --lr-policy step",
        {},
        "does nothing: it needs --warmup-epochs and --lr-policy cosine",
    ),
    (
        "lr_per_epoch",
        "--lr-per-epoch --lr-policy constant",
        {"warmup_steps": 0},
        "does nothing: it needs a rate that changes",
    ),
    ("ema_warmup", "--no-ema-warmup", {}, "--no-ema-warmup does nothing: it needs --ema-decay"),
    ("ema_start_epoch", "--ema-start-epoch 3", {}, "--ema-start-epoch 3 does nothing: it needs --ema-decay"),
    ("ema_start_epoch", "--ema-decay 0.9 --ema-start-epoch 21", {}, "does nothing: --epochs 20 end before"),
    ("bce_target_thresh", "--bce-target-thresh 0.2", {}, "--bce-target-thresh 0.2 does nothing: it needs --loss bce"),
    (
        "bce_target_thresh",
        "--bce-target-thresh 0.2 --loss bce",
        {},
        "does nothing: it needs --mixup, --cutmix or --label",
    ),
    (
        "bce_target_thresh",
        "--bce-target-thresh 0 --label-smoothing 0.1 --loss bce",
        {},
        "makes every target 1: with --label",
    ),
    (
        "bce_target_thresh",
        "--bce-target-thresh 0.95 --label-smoothing 0.1 --loss bce",
        {},
        "every target 0: with --label-",
    ),
    (
        "label_smoothing",
        "--label-smoothing 0.1 --loss bce --bce-target-thresh 0.2",
        {},
        "--label-smoothing 0.1 does nothing: --bce-target-thresh makes every target 0 or 1 again",
    ),
    (
        "label_smoothing",
        "--label-smoothing 0.1 --loss bce --bce-target-thresh 0.2 --mixup 0.2",
        {},
        "--label-smoothing 0.1 only moves the threshold: --bce-target-thresh makes every target 0 or 1 again",
    ),
    *(
        (
            name,
            f"{flag} --teacher T --distillation-alpha 1",
            {},
            f"{flag} does nothing: it needs a --distillation-alpha below 1",
        )
        for name, flag in (
            ("loss", "--loss bce"),
            ("label_smoothing", "--label-smoothing 0.1"),
            ("class_weights", "--class-weights balanced"),
        )
    ),
    ("bce_sum", "--bce-sum --loss focal", {}, "--bce-sum does nothing: it needs --loss bce"),
    ("bce_pos_weight", "--bce-pos-weight 2", {}, "--bce-pos-weight 2 does nothing: it needs --loss bce"),
    ("focal_gamma", "--focal-gamma 3 --loss bce", {}, "--focal-gamma 3 does nothing: it needs --loss focal"),
    (
        "teacher",
        "--teacher T --distillation-alpha 0",
        {},
        "--teacher T does nothing: it needs a --distillation-alpha above",
    ),
    ("distillation", "--distillation hard", {}, "--distillation hard does nothing: it needs --teacher"),
    ("distillation_alpha", "--distillation-alpha 0.1", {}, "--distillation-alpha 0.1 does nothing: it needs --teacher"),
    (
        "distillation_temperature",
        "--teacher T --distillation hard --distillation-temperature 3",
        {},
        "--distillation-temperature 3 does nothing: it needs --teacher and --distillation soft",
    ),
    (
        "ema_bn_batches",
        "--ema-bn-batches 4",
        {},
        "--ema-bn-batches 4 does nothing: it needs --ema-decay or --swa-start-",
    ),
    ("sam_adaptive", "--sam-adaptive", {}, "--sam-adaptive does nothing: it needs --sam-rho"),
    (
        "ema_bn_batches",
        "--ema-bn-batches 0 --ema-decay 0.9",
        {"gathers_statistics": False},
        "--ema-bn-batches 0 does nothing: it needs --ema-decay or --swa-start-epoch or a schedule-free optimizer, and batch "
        "norm in the network",
    ),
    ("swa_lr", "--swa-lr 0.05", {}, "--swa-lr 0.05 does nothing: it needs --swa-start-epoch"),
    (
        "early_stopping_metric",
        "--early-stopping-metric loss",
        {},
        "--early-stopping-metric loss does nothing: it needs --early",
    ),
    (
        "early_stopping_delta",
        "--early-stopping-delta 1",
        {},
        "--early-stopping-delta 1 does nothing: it needs --early-stop",
    ),
    ("blur_pool", "--blur-pool", {"blurs": False}, "--blur-pool does nothing: it needs a strided convolution of 16"),
    (
        "weight_decay_except",
        "--weight-decay-except a --weight-decay 0",
        {},
        "--weight-decay-except a does nothing: it needs a --weight",
    ),
    ("drop_last", "--drop-last", {"remainder": 0}, "--drop-last does nothing: it needs a last step that is smaller"),
    ("tf32", "--tf32", {"on_gpu": False}, "--tf32 does nothing: it needs a GPU"),
    (
        "init_scale",
        "--init-scale 4 --amp bf16",
        {"precision": "bf16"},
        "--init-scale 4 does nothing: it needs --amp fp16",
    ),
    ("init_scale", "--init-scale 65536", {"precision": "off"}, "--init-scale 65536 does nothing: it needs --amp fp16"),
    (
        "max_skipped_steps",
        "--max-skipped-steps 4",
        {"precision": "bf16"},
        "--max-skipped-steps 4 does nothing: it needs",
    ),
    (
        "fp32_layers",
        "--fp32-layers a",
        {"precision": "off"},
        "--fp32-layers a does nothing: it needs --amp fp16 or bf16",
    ),
    (
        "grad_compression",
        "--grad-compression bf16",
        {"processes": 1},
        "--grad-compression bf16 does nothing: it needs sever",
    ),
    ("bucket_mb", "--bucket-mb 5", {"processes": 1}, "--bucket-mb 5 does nothing: it needs several processes"),
    (
        "fp32_layers",
        "--fp32-layers a b",
        {"never_called": ("b",)},
        "--fp32-layers a b does nothing for b, which the network never calls; name the layers within",
    ),
]
BY_RECIPE_ALONE = {"nesterov"}  # given with another optimizer by the same hand, it is a mistake


def lines_of(line, **changes):
    return without_effect(arguments.parse(line.split()), RICH._replace(**changes))


def test_every_setting_that_needs_something_is_in_the_table():
    needing = {option.name for _, option in all_settings() if option.metadata["effect"]}
    assert {name for name, *_ in NEEDS} == needing - BY_RECIPE_ALONE


@pytest.mark.parametrize(("name", "line", "changes", "words"), NEEDS)
def test_a_setting_without_what_it_needs_is_told_in_one_line(name, line, changes, words):
    told_of = [found for found in lines_of(line, **changes) if words in found]
    assert len(told_of) == 1 and "\n" not in told_of[0]


@pytest.mark.parametrize(
    "line",
    [
        "--output D --name a --timeout 5 --workers 0 --skip-bad-images --max-shift 2 --shift-padding reflect "
        f"--channels-last --momentum 0.8 --no-decay-norm-bias --warmup-epochs 1 --tf32 --init-scale 4 {FILES} "
        "--max-skipped-steps 4 --drop-last --fp32-layers a --nesterov --lr-policy multistep --lr-milestones 5 --lr-gamma 0.5",
        f"--decode gpu {FILES}",
        "--lr-base 0.1 --lr-base-size 64 --lr-base-scale sqrt --lr-min 0.01 --lr-cycle-epochs 5 --lr-cycle-mul 2 "
        "--lr-cycle-decay 0.5",
        "--lr-policy step --lr-step-epochs 3 --lr-gamma 0.5 --sam-rho 0.05 --sam-adaptive",
        "--lr-policy poly --lr-power 3",
        "--lr-policy triangular --lr-pct-start 0.2 --lr-div-factor 2",
        "--ema-decay 0.9 --ema-bn-batches 0",
        "--grad-compression bf16 --bucket-mb 5",
        "--swa-start-epoch 0.75 --swa-lr 0.05 --ema-bn-batches 4 --early-stopping 5 --early-stopping-metric loss "
        "--early-stopping-delta 0.1",
        "-b 8 --evaluate --pretrained",
        "--output D --name a --resume auto",
    ],
)
def test_a_setting_with_what_it_needs_is_not_told(line):
    assert lines_of(line, continues="--resume" in line) == []


def test_settings_and_facts_do_not_share_a_name():
    assert not set(Settings().values()) & set(Facts._fields)


def test_what_is_given_as_off_asks_for_nothing():
    assert lines_of("--no-tf32 --warmup-epochs 0 --no-nesterov", on_gpu=False, warmup_steps=0) == []


# ------------------------------------------------------------------------------------------ who is told


def recipe(tmp_path, text):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return str(path)


def test_a_recipe_is_told_of_what_it_sets_otherwise_than_the_default(tmp_path):
    path = recipe(tmp_path, "lr-gamma: 0.5\nmomentum: 0.9\noptimizer: lion\ninit-scale: 4\n")
    assert lines_of(f"--config {path}", has_momentum=False, precision="off") == [
        f"recipe {path}: lr-gamma: 0.5 does nothing: it needs --lr-policy multistep or step",
        f"recipe {path}: init-scale: 4 does nothing: it needs --amp fp16",
    ]


def test_the_saved_configuration_of_a_run_has_nothing_to_be_told(tmp_path):
    saved = recipe(tmp_path, arguments.as_recipe(arguments.parse(["--optimizer", "lion"]), "main.py"))
    assert lines_of(f"--config {saved}", has_momentum=False, precision="off", on_gpu=False, augmentation=()) == []


def test_a_checkpoints_settings_are_not_told():
    args = arguments.parse([], 1, {"lr_gamma": 0.5, "init_scale": 4.0})
    assert without_effect(args, RICH._replace(precision="off")) == []


def test_a_flag_wins_over_what_the_recipe_sets_for_another_choice(tmp_path):
    path = recipe(tmp_path, "lr-policy: multistep\nlr-milestones: [3, 6]\nlr-gamma: 0.2\nnesterov: true\n")
    assert lines_of(f"--config {path} --lr-policy cosine --optimizer adamw") == [
        f"recipe {path}: nesterov: true does nothing: it needs --optimizer sgd or muon-sgd",
        f"recipe {path}: lr-milestones: 3 6 does nothing: it needs --lr-policy multistep, not cosine",
        f"recipe {path}: lr-gamma: 0.2 does nothing: it needs --lr-policy multistep or step",
    ]
    for line in ("--lr-milestones 3 6", "--nesterov --optimizer adamw"):
        with pytest.raises(UserError):
            arguments.parse(line.split())
    with pytest.raises(UserError):
        arguments.parse(["--config", recipe(tmp_path, "lr-milestones: [3, 6]\n")])


def test_evaluation_is_told_of_each_flag_that_only_trains_and_not_of_its_recipe(tmp_path):
    path = recipe(tmp_path, "lr: 0.3\nmixup: 0.2\nsave-every-steps: 5\nworkers: 0\n")
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


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


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


def test_a_run_whose_settings_all_have_an_effect_tells_nothing(workplace, capsys):
    assert told(capsys, (*SMALL, "--max-steps", 1, "--momentum", 0.5, "--lr-policy", "gaussian")) == (0, [])
