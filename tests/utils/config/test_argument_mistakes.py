"""Every wrong input is a UserError with a line a mistake that names the flag or key."""

from functools import partial

import pytest

from tests import helpers
from utils.config import arguments
from utils.config.settings import UserError

mistakes_of = partial(helpers.mistakes_of, arguments.parse)

# Each: the command line, then one tuple a line, of words that the line must hold.
# of a flag that one program alone has, its other defaults, too
TIMM = ("these are flags of timm's",)
TORCHVISION = ("these are flags of torchvision's",)

# A wrong name, a text that is none: tests/faults/test_18 and 19. A word without a flag: test_other_programs.py.
WRONG_COMMAND_LINES = [
    # unknown flags, with the nearest name
    ("--epochz 3", ("'--epochz'", "--epochs?")),
    ("--batch_size 3", ("'--batch_size'", "--batch-size?")),
    ("--amp-dtype=bfloat16", ("'--amp-dtype'", "did you mean --amp bf16?"), TIMM),
    ("--test-only", ("'--test-only'", "did you mean --evaluate?"), TORCHVISION),
    ("--no-aug", ("'--no-aug'", "write --augment none"), TIMM),
    ("--norm-weight-decay 0", ("'--norm-weight-decay'", "for 0 write --no-decay-norm-bias"), TORCHVISION),
    ("-lr 1", ("'-lr'", "did you mean --lr?")),
    ("--clip-grad-n 1", ("'--clip-grad-n'", "did you mean --clip-grad-norm?")),
    ("--save-every 3", ("'--save-every'", "did you mean --save-every-epochs or --save-every-steps?")),
    ("--no-progres", ("'--no-progres'", "--no-progress?")),
    ("--no-epochs 3", ("'--no-epochs'", "--epochs?")),
    ("-x 3", ("'-x'",)),
    ("-epochs 3", ("-epochs", "--epochs")),
    # values that belong nowhere, or are missing
    ("--epochs", ("--epochs", "needs a value")),
    ("--augment", ("--augment", "needs a value")),
    ("--no-compile=1", ("--no-compile", "no value")),
    # numbers
    ("--epochs x", ("--epochs", "'x'", "whole number")),
    ("--gpu-ids 0 x", ("--gpu-ids", "'x'", "whole number")),
    # choices, with the nearest name
    ("--dataname digit", ("--dataname", "'digit'", "digits?")),
    ("--dataname cifar", ("--dataname", "cifar10")),
    ("--device gpu", ("--device", "'gpu'", "did you mean cuda?")),
    ("--amp", ("--amp", "needs a value: off, fp16, bf16")),
    ("--augment shift,flip", ("--augment", "'shift,flip': write shift flip")),
    ("--init kaiming", ("--init", "'kaiming'", "kaiming_normal")),
    ("--amp fp32", ("--amp", "'fp32'", "off, fp16, bf16")),
    ("--augment flip shft", ("--augment", "'shft'", "shift?")),
    # text
    ("--config nowhere/none", ("--config", "'nowhere/none'")),
    ("--config /", ("--config", "'/'")),
    # contradictions
    ("--batch-size 10 --global-batch-size 64", ("--batch-size 10", "--global-batch-size 64")),
    ("--nesterov --optimizer adam", ("--nesterov", "--optimizer", "adam")),
    ("--nesterov --momentum 0", ("--nesterov", "--momentum")),
    ("--pretrained --weights x.pt", ("--pretrained", "--weights")),
    ("--init xavier_normal --pretrained", ("--init xavier_normal", "pretrained")),
    ("--init xavier_normal --weights x.pt", ("--init xavier_normal", "--weights")),
    ("--lr-milestones 3", ("--lr-milestones", "--lr-policy")),
    ("--lr-policy multistep --lr-milestones 5 3", ("--lr-milestones", "rise")),
    ("--warmup-epochs 21", ("--warmup-epochs 21", "--epochs 20")),
    ("--clip-grad-norm 1 --clip-grad-agc 0.01", ("--clip-grad-norm", "--clip-grad-agc", "give one")),
    ("--clip-grad-norm 1 --clip-grad-value 2", ("--clip-grad-norm", "--clip-grad-value", "give one")),
    ("--grad-penalty 0.1 --compile", ("--grad-penalty", "--compile")),
    ("--amp none", ("--amp 'none': choose from off", "did you mean off?")),
    ("--workers many", ("--workers", "whole number or auto")),
    ("--channels-last maybe", ("--channels-last", "choose from auto, on, off")),
    ("--augment flip alternating-flip", ("flip", "alternating-flip")),
    ("--decode gpu --device cpu", ("--decode gpu", "--device cpu")),
    ("--dataname imagenet --datapath d --decode gpu --skip-bad-images", ("--skip-bad-images", "with --decode gpu")),
    ("--gpu-ids 0 --device cpu", ("--gpu-ids", "--device cpu")),
    ("--gpu-ids 0 0", ("--gpu-ids", "twice")),
    ("--augment none flip", ("--augment none",)),
    ("--val-split 0.1", ("--val-split", "folder")),
    ("--dataname mnist", ("--dataname mnist", "--datapath", "--download")),
    ("--dataname folder", ("--dataname folder", "--datapath")),
    ("--download", ("--download", "digits")),
    ("--evaluate", ("--evaluate", "--resume", "--weights", "--pretrained")),
    ("--evaluate --resume auto", ("--evaluate", "--resume auto")),
    ("--resume y.pt --weights x.pt", ("--resume", "--weights")),
    ("--resume auto --resume-override", ("--resume-override", "--resume auto")),
    ("--resume-override", ("--resume-override", "needs --resume PATH")),
    ("--evaluate --resume x.pt --resume-override", ("--resume-override", "--evaluate")),
    ("--balanced-sampler --repeated-augmentation 2", ("--balanced-sampler and --repeated-augmentation",)),
    ("--freeze a --freeze-epoch 3 --unfreeze-epoch 2", ("--freeze-epoch 3 is not below --unfreeze-epoch 2",)),
    ("--freeze a --freeze-epoch 2 --unfreeze-epoch 2", ("--freeze-epoch 2 is not below --unfreeze-epoch 2",)),
    ("--lr-min 0.1", ("--lr-min 0.1 is not below the peak",)),
    ("--lr 0.01 --lr-min 0.02", ("--lr-min 0.02 is not below the peak",)),
    ("--lr-base 0.1 -b 64 --lr-min 0.03", ("--lr-min 0.03 is not below the peak",)),
    ("--lr-policy one-cycle --warmup-epochs 1", ("--warmup-epochs", "--lr-pct-start")),
    ("--lr-policy triangular --warmup-epochs 1", ("--warmup-epochs", "--lr-pct-start")),
    # techniques
    ("--swa-start-epoch 5 --ema-decay 0.9", ("are two averages of the weights; give one",)),
    ("--swa-start-epoch 21", ("--swa-start-epoch 21 is beyond --epochs 20",)),
    ("--swa-start-epoch 5 --ema-bn-batches 0", ("need batch-norm statistics of their own",)),
    ("--swa-start-epoch 1.5", ("must be a whole epoch, or a fraction below 1",)),
    ("--optimizer schedulefree-sgd --lr-policy cosine", ("--lr-policy cosine contradicts --optimizer schedulefree-s",)),
    ("--optimizer schedulefree-sgd --lr-policy one-cycle --warmup-epochs 1", ("--lr-policy one-cycle contradicts --",)),
    ("--optimizer schedulefree-sgd --ema-decay 0.9", ("--ema-decay contradicts --optimizer schedulefree-sgd, which ",)),
    ("--optimizer schedulefree-sgd --swa-start-epoch 3", ("--swa-start-epoch contradicts --optimizer schedulefree-s",)),
    ("--optimizer schedulefree-sgd --lookahead 6 0.5", ("--lookahead contradicts --optimizer schedulefree-sgd, whic",)),
    ("--optimizer schedulefree-sgd --ema-bn-batches 0", ("need batch-norm statistics of their own",)),
    # several at once
    ("--epochz 3 --lr x --amp fp8", ("--epochz",), ("--lr", "'x'"), ("--amp", "'fp8'")),
    ("-e5 --epochs x", ("-e",), ("--epochs", "'x'")),
    ("-hx --epochs x", ("-h",), ("--epochs", "'x'")),
    ("--lr x --lr-milestones 3", ("--lr ", "'x'"), ("--lr-milestones", "--lr-policy")),
    ("--init x --init-scale -1", ("--init ", "'x'"), ("--init-scale", "'-1'")),
    ("--val-split 0.1 --gpu-ids 1 1 --download", ("--val-split",), ("--gpu-ids",), ("--download",)),
    ("--nesterov=1 one two", ("--nesterov",), ("'one'",), ("'two'",)),
    ("--config nowhere --epochs 0", ("--config",), ("--epochs",)),
]


@pytest.mark.parametrize(("line", "expected"), [(line, words) for line, *words in WRONG_COMMAND_LINES])
def test_wrong_command_line_gives_a_line_a_mistake(line, expected):
    lines = mistakes_of(line.split())
    assert len(lines) == len(expected), lines
    for words in expected:
        assert any(all(word in found for word in words) for found in lines), (words, lines)


# Values that a flag does not take, by what its line says of them; a comma stands for a blank.
WRONG_VALUES = {
    "at least 0": "seed=-1 weight-decay=-1 workers=-1 grad-penalty=-1 max-skipped-steps=-1",
    "at least 1": "epochs=0 batch-size=0 accumulate=0 image-size=0 image-size=0,20 val-image-size=0 val-batch-size=0 "
    "max-steps=0 print-freq=0 save-every-steps=0",
    "at least": "init-scale=0 crop-pct=0",
    "more than 0": "lr=0 lr=-1e-3 clip-grad-norm=0 clip-grad-value=0 swa-start-epoch=0 std=0",
    "less than 1": "momentum=1 label-smoothing=1 ema-decay=1",
    "at most": "epochs=99999999999 crop-pct=1.2 image-size=8193,2",
    "finite": "lr=nan mean=nan pixel-range=0,nan",
    "choose from": "crop-mode=middle interpolation=nearest",
    "one number, the side of a square, or two": "image-size=12,20,3",
    "two numbers, the lower first": "pixel-range=0 pixel-range=9,0",
    "a whole number of steps and a number above 0": "lookahead=6 lookahead=0,0.5 lookahead=1.5,0.5 lookahead=6,0 "
    "lookahead=6,1.1 lookahead=6,0.5,1",
}


@pytest.mark.parametrize(
    ("words", "given"), [(words, given) for words, all_given in WRONG_VALUES.items() for given in all_given.split()]
)
def test_a_value_that_a_flag_does_not_take_is_one_line(words, given):
    flag, _, values = given.partition("=")
    (line,) = mistakes_of([f"--{flag}", *values.split(",")])
    assert line.startswith(f"--{flag} ") and values.rpartition(",")[2] in line and words in line


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        ([""], "''"),
        (["--lr", ""], "--lr"),
        (["--arch", " "], "--arch"),
        (["--output", "a\0b"], "--output"),
        (["--output", "runs\udcff"], "--output"),  # bytes that are no text: they could not be logged
        (["--config", "a\0b"], "--config"),
        (["--config", "x" * 5000], "--config"),
        (["--epochs", "9" * 5000], "--epochs"),
        (["--", "--lr", "1"], "'--'"),
    ],
)
def test_text_that_cannot_be_meant_gives_one_short_line(argv, word):
    (line,) = mistakes_of(argv)
    assert word in line and len(line) < 400


# Each: the recipe, then one tuple a line, of words that the line must hold besides the recipe's path.
WRONG_RECIPES = [
    ("epoch: 3", ("'epoch'", "epochs?")),
    ("1: 2", ("1 is not a setting",)),
    ("lr: 1\nlr: 2", ("'lr'", "twice")),
    ("batch-size: 1\nbatch_size: 1", ("batch_size", "twice")),
    ("lr: x", ("lr", "'x'", "number")),
    ("lr: [0.1]", ("lr", "number")),
    ("lr: {a: 1}", ("lr", "number")),
    ("lr: .nan", ("lr", "finite")),
    ("epochs: 3.5", ("epochs", "3.5", "whole number")),
    ("epochs: true", ("epochs", "True", "whole number")),
    ("epochs: null", ("epochs", "value")),
    ("epochs: 0", ("epochs", "at least 1")),
    ("nesterov: 1", ("nesterov", "true or false")),
    ("nesterov: 'yes'", ("nesterov", "true or false")),
    ("amp: on", ("amp", "off, fp16, bf16")),
    ("name: 2024-01-01", ("name", "text")),
    ("augment: [flip, rotate]", ("augment", "'rotate'")),
    ("augment: []", ("augment", "value")),
    ("augment: shift flip", ("augment", "'shift flip': write [shift, flip]")),
    ("augment: '[shift, flip]'", ("augment", "write [shift, flip]")),
    ("batchsize: 3", ("'batchsize'", "did you mean batch-size?")),
    ("no-aug: true", ("'no-aug'", "write --augment none"), TIMM),
    ("resume: auto", ("'resume'", "command line")),
    ("- epochs", ("setting: value",)),
    ("just text", ("setting: value",)),
    ("epochs: [3", ("cannot be read",)),
    ("a: 1\n---\nb: 2", ("cannot be read",)),
    ("lr: &a [*a]", ("lr", "number")),
    ("[" * 500, ("cannot be read",)),
    ("epoch: 3\nlr: x\nlr-polic: cosine", ("'epoch'",), ("lr 'x'",), ("'lr-polic'", "lr-policy")),
]


@pytest.mark.parametrize(
    ("content", "expected"), [(content, words) for content, *words in WRONG_RECIPES], ids=lambda value: str(value)[:30]
)
def test_wrong_recipe_gives_a_line_a_mistake_that_names_the_file(content, expected, recipe):
    path = recipe(content)
    lines = mistakes_of(["--config", path])
    assert len(lines) == len(expected), lines
    assert all(path in line for line in lines)
    for words in expected:
        assert any(all(word in found for word in words) for found in lines), (words, lines)


def test_a_setting_that_is_gone_is_refused_where_it_did_something_and_else_passed_over(recipe):
    older = "local-sgd-steps: null\nlocal-sgd-after-epochs: 0.0\nlocal-sgd-group: machine\nepochs: 3\n"
    older += "matmul-weight-grad: [features.3.conv2]\n"
    assert arguments.parse(["--config", recipe(older)]).optimisation.epochs == 3
    for argv in (["--config", recipe("local-sgd-steps: 4\n")], ["--local-sgd-steps", "4"]):
        with pytest.raises(UserError, match=r"local-sgd-steps'? is gone; CHANGELOG\.md says what to use instead"):
            arguments.parse(argv)


def test_unknown_recipe_is_answered_with_the_nearest_and_where_all_are(tmp_path, monkeypatch):
    monkeypatch.setattr(arguments, "CONFIGS", tmp_path)
    for name in ("mnist/fc", "cifar10/resnet18"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / f"{name}.yaml").write_text("")
    (line,) = mistakes_of(["--config", "mnist/fd"])
    assert "did you mean mnist/fc?" in line and "launch.sh --list" in line


def test_mistakes_of_recipe_flags_and_contradictions_come_together(recipe):
    lines = mistakes_of(["--config", recipe("epoch: 3\nwarmup-epochs: 50\n"), "--amp", "fp8", "--evalute"])
    assert len(lines) == 4
    for word in ("'epoch'", "--warmup-epochs", "--amp", "--evaluate?"):
        assert sum(word in line for line in lines) == 1


def test_batch_size_that_contradicts_the_number_of_processes_names_that_number():
    (line,) = mistakes_of(["--batch-size", "32", "--global-batch-size", "64"], world_size=3)
    assert "3 processes" in line


def test_mistakes_of_the_command_line_are_alike_on_all_ranks():
    with pytest.raises(UserError) as caught:
        arguments.parse(["--epochs", "0"], 2)
    assert caught.value.on_all_ranks
