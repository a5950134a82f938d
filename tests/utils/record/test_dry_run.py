"""The plan of ``--dry-run`` shows every setting that shapes the result."""

import dataclasses

import numpy as np
import pytest
import torch
from PIL import Image

import main
from models import build_model
from utils.config import arguments
from utils.config.groups.model import ModelSettings
from utils.config.settings import all_settings
from utils.record import dry_run
from utils.run import Run
from utils.runtime.distributed import Distributed, RankInfo
from utils.runtime.exchange import exchange_words

BASE = ("--dry-run", "--device", "cpu", "--arch", "conv2")

# For each setting that shapes the result: a command line without it, and what is added. None: see the last tests.
CHANGES = {
    "seed": ("", "--seed 7"),
    "val_every_epochs": ("", "--val-every-epochs 2"),
    "best_metric": ("", "--best-metric loss"),
    "early_stopping": ("", "--early-stopping 3"),
    "early_stopping_metric": ("--early-stopping 3", "--early-stopping-metric loss"),
    "early_stopping_delta": ("--early-stopping 3", "--early-stopping-delta 0.1"),
    "dataname": ("--image-size 8", "--dataname synthetic"),
    "val_split": None,
    "val_split_by": None,
    "image_column": None,
    "label_column": None,
    "image_size": ("", "--image-size 16"),
    "val_image_size": ("--arch timm/test_resnet", "--val-image-size 16"),
    "progressive_size": ("--arch conv2a", "--progressive-size 4"),
    "progressive_step": ("--arch conv2a --progressive-size 4 --progressive-epochs 2 9", "--progressive-step 2"),
    "progressive_epochs": ("--arch conv2a --progressive-size 4", "--progressive-epochs 2 9"),
    "crop_pct": ("", "--crop-pct 0.5"),
    "crop_mode": None,
    "interpolation": ("--image-size 16", "--interpolation bicubic"),
    "mean": ("", "--mean 0.4"),
    "std": ("", "--std 0.4"),
    "pixel_range": None,
    "global_batch_size": ("", "--global-batch-size 128"),
    "drop_last": ("", "--drop-last"),
    "balanced_sampler": ("", "--balanced-sampler"),
    "shard_window": None,
    "train_samples": ("", "--train-samples 100"),
    "max_val_batches": ("", "--max-val-batches 2"),
    "tta": ("", "--tta flip"),
    "augment": ("", "--augment none"),
    "max_shift": ("", "--max-shift 2"),
    "crop_min_area": ("--augment resized-crop", "--crop-min-area 0.35"),
    "shift_padding": ("", "--shift-padding reflect"),
    "auto_augment": ("", "--auto-augment ra"),
    "rotation": ("", "--rotation 15"),
    "color_jitter": ("", "--color-jitter 0.4"),
    "color_jitter_prob": ("--color-jitter 0.4", "--color-jitter-prob 0.5"),
    "grayscale_prob": ("--dataname synthetic --image-size 8", "--grayscale-prob 0.5"),
    "gaussian_blur_prob": ("", "--gaussian-blur-prob 0.5"),
    "random_erase": ("", "--random-erase 0.5"),
    "random_erase_mode": ("--random-erase 0.5", "--random-erase-mode pixel"),
    "random_erase_count": ("--random-erase 0.5", "--random-erase-count 2"),
    "cutout": ("", "--cutout 2"),
    "mixup": ("", "--mixup 0.2"),
    "cutmix": ("--mixup 0.2", "--cutmix 1"),
    "mixup_mode": ("--mixup 0.2", "--mixup-mode batch"),
    "mixup_prob": ("--mixup 0.2", "--mixup-prob 0.5"),
    "mixup_switch_prob": ("--mixup 0.2 --cutmix 1", "--mixup-switch-prob 0.8"),
    "mixup_off_epoch": ("--cutmix 1", "--mixup-off-epoch 15"),
    "repeated_augmentation": ("", "--repeated-augmentation 3"),
    "arch": ("", "--arch conv4"),
    "pretrained": None,
    "weights": ("", "--weights weights.pt"),
    "new_head": ("--weights weights.pt", "--new-head"),
    "drop": ("--arch timm/test_vit --image-size 32", "--drop 0.1"),
    "drop_path": ("--arch timm/test_vit --image-size 32", "--drop-path 0.1"),
    "model_kwargs": ("--arch timm/test_vit --image-size 32", "--model-kwargs qk_norm=true"),
    "blur_pool": ("--arch timm/resnet18", "--blur-pool"),
    "sync_bn": None,
    "freeze": ("--arch vgg11", "--freeze features.0"),
    "freeze_epoch": ("--arch vgg11 --freeze features", "--freeze-epoch 5"),
    "unfreeze_epoch": ("--arch vgg11 --freeze features", "--unfreeze-epoch 5"),
    "freeze_bn": ("--arch vgg11", "--freeze-bn"),
    "compile": ("", "--compile"),
    "compile_augment": ("", "--compile-augment"),
    "matmul_weight_grad": ("", "--matmul-weight-grad features.0"),
    "init": ("", "--init xavier_normal"),
    "epochs": ("", "--epochs 5"),
    "optimizer": ("--lr 0.1", "--optimizer lamb"),
    "lr": ("", "--lr 0.2"),
    "lr_base": ("", "--lr-base 0.2"),
    "lr_base_size": ("--lr-base 0.2", "--lr-base-size 128"),
    "lr_base_scale": ("--lr-base 0.2", "--lr-base-scale sqrt"),
    "lr_min": ("", "--lr-min 0.01"),
    "momentum": ("", "--momentum 0.5"),
    "opt_eps": ("--optimizer adamw", "--opt-eps 0.001"),
    "opt_betas": ("--optimizer adamw", "--opt-betas 0.8 0.9"),
    "opt_kwargs": ("--optimizer adamw", "--opt-kwargs amsgrad=true"),
    "nesterov": ("", "--nesterov"),
    "weight_decay": ("", "--weight-decay 0.25"),
    "decay_norm_bias": ("", "--no-decay-norm-bias"),
    "weight_decay_except": ("", "--weight-decay-except *.bias"),
    "loss": ("", "--loss bce"),
    "label_smoothing": ("", "--label-smoothing 0.1"),
    "bce_target_thresh": ("--loss bce --mixup 0.2", "--bce-target-thresh 0.2"),
    "bce_sum": ("--loss bce", "--bce-sum"),
    "bce_pos_weight": ("--loss bce", "--bce-pos-weight 2"),
    "focal_gamma": ("--loss focal", "--focal-gamma 3"),
    "class_weights": ("", "--class-weights balanced"),
    "layer_decay": ("", "--layer-decay 0.75"),
    "lr_scale": ("", "--lr-scale features.*=0.5"),
    "backbone_lr_scale": ("", "--backbone-lr-scale 0.1"),
    "teacher": None,
    "distillation": None,
    "distillation_alpha": None,
    "distillation_temperature": None,
    "lr_policy": ("", "--lr-policy gaussian"),
    "lr_milestones": ("--lr-policy multistep", "--lr-milestones 11 15"),
    "lr_gamma": ("--lr-policy multistep", "--lr-gamma 0.5"),
    "lr_step_epochs": ("--lr-policy step", "--lr-step-epochs 5"),
    "lr_power": ("--lr-policy poly", "--lr-power 3"),
    "lr_cycle_epochs": ("", "--lr-cycle-epochs 5"),
    "lr_cycle_mul": ("--lr-cycle-epochs 5", "--lr-cycle-mul 2"),
    "lr_cycle_decay": ("--lr-cycle-epochs 5", "--lr-cycle-decay 0.5"),
    "lr_pct_start": ("--lr-policy one-cycle", "--lr-pct-start 0.5"),
    "lr_div_factor": ("--lr-policy triangular", "--lr-div-factor 2"),
    "warmup_epochs": ("", "--warmup-epochs 0.1"),
    "warmup_lr": ("--warmup-epochs 2", "--warmup-lr 0.02"),
    "warmup_prefix": ("--warmup-epochs 2", "--no-warmup-prefix"),
    "lr_per_epoch": ("", "--lr-per-epoch"),
    "accumulate": ("--global-batch-size 128", "--accumulate 2"),
    "clip_grad_norm": ("", "--clip-grad-norm 1"),
    "clip_grad_value": ("", "--clip-grad-value 1"),
    "clip_grad_agc": ("", "--clip-grad-agc 0.01"),
    "grad_penalty": ("", "--grad-penalty 0.1"),
    "sam_rho": ("", "--sam-rho 0.05"),
    "sam_adaptive": ("--sam-rho 0.05", "--sam-adaptive"),
    "lookahead": ("", "--lookahead 6 0.5"),
    "ema_decay": ("", "--ema-decay 0.9"),
    "ema_warmup": ("--ema-decay 0.9", "--no-ema-warmup"),
    "ema_start_epoch": ("--ema-decay 0.9", "--ema-start-epoch 6"),
    "ema_bn_batches": ("--arch vgg11 --ema-decay 0.9", "--ema-bn-batches 5"),
    "swa_start_epoch": ("", "--swa-start-epoch 0.75"),
    "swa_lr": ("--swa-start-epoch 0.75", "--swa-lr 0.05"),
    "amp": ("", "--amp bf16"),
    "tf32": None,
    "init_scale": ("--amp fp16", "--init-scale 2"),
    "fp32_layers": ("--amp bf16", "--fp32-layers features"),
    "grad_compression": None,
}


def shown(capsys, *flags):
    """The plan as {title: text}, without the run folder, whose name holds the time."""
    assert main.main([*BASE, *flags]) == 0
    out, err = capsys.readouterr()
    assert err == "", "a setting without an effect shapes nothing"
    rows = {line[:14].strip(): line[15:] for line in out.splitlines()}
    assert rows.pop("Run folder").endswith("(not created)")
    return rows


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_table_above_holds_every_setting_that_shapes_the_result():
    assert set(CHANGES) == {option.name for _, option in all_settings() if option.metadata["affects_result"]}


@pytest.mark.parametrize("name", [name for name, change in CHANGES.items() if change])
def test_each_setting_that_shapes_the_result_changes_the_plan(name, workplace, capsys):
    if name in ("weights", "new_head"):
        model = build_model(ModelSettings(arch="conv2"), classes=10, channels=1, image_size=8)
        torch.save(model.state_dict(), "weights.pt")
    without, added = CHANGES[name]
    assert shown(capsys, *without.split()) != shown(capsys, *without.split(), *added.split())


def test_of_images_in_files_the_share_kept_for_validation_and_the_crop_are_in_the_plan(workplace, capsys):
    pixels = np.random.default_rng(0).integers(0, 256, (40, 8, 8, 3), dtype=np.uint8)
    for number, image in enumerate(pixels):
        folder = workplace / "ab"[number % 2]
        folder.mkdir(exist_ok=True)
        Image.fromarray(image).save(folder / f"{number}.png")
    line = "--dataname folder --datapath . --image-size 8 --val-split"
    plans = [shown(capsys, *line.split(), share) for share in ("0.11", "0.12")]  # of the same number of images
    assert plans[0]["Data"] != plans[1]["Data"]
    assert shown(capsys, *line.split(), "0.11", "--val-split-by", "draw")["Data"] != plans[0]["Data"]
    assert shown(capsys, *line.split(), "0.11", "--crop-mode", "squash") != plans[0]


def test_pretrained_weights_and_tf32_on_a_gpu_are_in_the_plan(workplace):
    args = arguments.parse([*BASE])
    with Distributed(RankInfo(), args.run) as distributed:
        parts = main.build(Run(args, distributed))
        pretrained = dataclasses.replace(args, model=dataclasses.replace(args.model, pretrained=True))
        texts = [dry_run.plan(Run(settings, distributed), parts) for settings in (args, pretrained)]
    assert texts[0] != texts[1]
    precisions = [dataclasses.replace(args.precision, amp="off", tf32=tf32) for tf32 in (None, True, False)]
    rows = {
        dry_run._precision(dataclasses.replace(args, precision=precision), parts, torch.device("cuda"))
        for precision in precisions
    }
    assert len(rows) == 3


def test_what_several_processes_exchange_is_in_the_plan():
    changes = ["", "--grad-compression bf16", "--bucket-mb 5"]
    exchanges = [arguments.parse(flags.split()).exchange for flags in changes]
    rows = {exchange_words(exchange, 4) for exchange in exchanges}
    assert len(rows) == len(changes) and "" in rows
    assert {exchange_words(exchange, 1) for exchange in exchanges} == {""}


def test_the_plan_of_a_resumed_run_says_what_it_goes_on_from(workplace, capsys):
    assert main.main(["--device", "cpu", "--arch", "fc", "--max-steps", "2", "--no-progress"]) == 0
    (run,) = (workplace / "runs/digits/fc").iterdir()
    capsys.readouterr()
    assert main.main(["--dry-run", "--device", "cpu", "--resume", str(run)]) == 0
    out = capsys.readouterr().out
    assert f"resumes from {run}/checkpoints/last.pt" in out and f"{run} (continues there)" in out
