"""What main.py answers to every flag of timm's, torchvision's and ultralytics' training programs, and to others'."""

import re

import pytest

from utils.config import arguments
from utils.config.other_programs import other_programs
from utils.config.settings import UserError, all_settings, flag_of
from utils.config.spelling import meant_value, nearest
from utils.config.synonyms import SYNONYMS, meant

FLAGS = sorted({flag for action in arguments.build_parser()._actions for flag in action.option_strings})
PROGRAMS = tuple(other_programs().programs.values())
TIMM, TORCHVISION, ULTRALYTICS, EXAMPLE, OTHERS = PROGRAMS
OURS = "ours"
FLAG_MEANT = {name: flag_of(setting) for name, setting in SYNONYMS.items()}
# What programs whose names no page shows call a setting of ours: here alone is it said a second time.
MEANT = {
    "accumulate": "accum-iter update-freq",
    "batch-size": "batch",
    "datapath": "data",
    "drop": "dropout",
    "early-stopping": "patience",
    "grad-checkpointing": "gradient-checkpointing",
    "image-size": "imgsz",
    "lr": "lr0 learning-rate",
    "max-val-batches": "limit-val-batches",
    "opt-betas": "betas",
    "opt-eps": "adam-epsilon eps",
    "output": "project",
    "random-erase": "erasing",
    "save-every-epochs": "save-period",
    "weights": "finetune",
}
ULTRALYTICS_SAME = "epochs name workers seed momentum weight-decay warmup-epochs".split()


def answers(names, prefix="--", value=" 1"):
    """The end of the line that each name is answered with, all in one command."""
    argv = [word for name in names for word in f"{prefix}{name}{value}".split()]
    mistakes = arguments.read(argv).mistakes
    found = {}
    for name in names:
        own = [
            line for line in mistakes if line.startswith((f"'{prefix}{name}' is", f"'{prefix}{name}{value}' belongs"))
        ]
        found[name] = own[0].partition(" is not a flag")[2].removesuffix("; --help lists them all") if own else OURS
    return found


def is_advice(answer):
    return re.match(r": (for 0 )?write |: leave it out|(:| and has) no equivalent", answer) is not None


@pytest.mark.parametrize(
    ("name", "count"), [("timm", 180), ("torchvision", 62), ("imagenet-example", 22), ("others", 43)]
)
def test_each_flag_of_a_program_is_ours_or_answered_with_what_to_do(name, count):
    program = other_programs().programs[name]
    names = program.synonyms | program.instead.keys() | program.same
    assert len(names) == count, f"other_programs.yaml holds each of {name}'s flags: in `same`, `instead` or `synonyms`"
    assert {f"-{one}" if len(one) == 1 else f"--{one}" for one in program.same} <= {*FLAGS}
    for one, found in answers([one for one in names - program.same if len(one) > 1]).items():
        assert found != OURS, f"--{one} is a flag of ours now: move it to `same` in other_programs.yaml"
        is_synonym = one in program.synonyms and one not in program.instead
        assert found == f" (did you mean {FLAG_MEANT[one]}?)" if is_synonym else is_advice(found), (one, found)


def test_each_argument_of_ultralytics_is_answered_with_what_to_write():
    names = {*ULTRALYTICS_SAME, *ULTRALYTICS.synonyms, *ULTRALYTICS.instead}
    assert len(names) == 110
    for name in names:
        (line, *_) = arguments.read([f"{name.replace('-', '_')}=0.5"]).mistakes
        answer = line.partition("belongs to no flag")[2]
        flag = FLAG_MEANT[name] if name in ULTRALYTICS.synonyms else f"--{name}"
        assert is_advice(answer) if name in ULTRALYTICS.instead else answer == f": write {flag} 0.5", (name, line)


def test_the_table_above_holds_what_other_programs_call_our_settings():
    expected = {name: f"--{ours}" for ours, names in MEANT.items() for name in names.split()}
    assert {name: FLAG_MEANT[name] for name in expected} == expected


def test_an_advice_names_flags_that_exist():
    theirs = {f"--{name}" for program in PROGRAMS for name in (*program.instead, *program.synonyms)}
    texts = [text for program in PROGRAMS for text in program.instead.values()]
    for text in texts:
        flags = re.findall(r"--[a-z][a-z-]+", text)
        first = re.match(r"(?:for 0 )?write (--[a-z-]+)", text)
        assert {*flags} <= {*FLAGS, *theirs} and (first is None or first[1] in FLAGS), text
    for program in PROGRAMS:
        asked = [flag for silent in program.silent for flag in re.findall(r"\((--.*)\)", silent.words)]
        for flags in asked:
            assert not arguments.read(flags.split()).mistakes, flags


def test_what_an_advice_asks_for_is_accepted_as_it_stands():
    """The silent defaults of a program, all together, make a run."""
    for program in (TIMM, TORCHVISION, ULTRALYTICS):
        asked = {flags for silent in program.silent for flags in re.findall(r"\((--.*)\)", silent.words)}
        asked -= {"--opt-eps 0.0316", "--lr-milestones 89 179 269", "--lr-milestones 90 180 270"}  # of one choice each
        data = ["--dataname", "folder", "--datapath", "d"]
        arguments.parse([*data, *(word for flags in sorted(asked) for word in flags.split())])
    arguments.parse("--lr-policy multistep --epochs 300 --lr-milestones 89 179 269".split())


def test_a_name_has_one_meaning():
    options = {option.name for _, option in all_settings()}
    names = [name for _, option in all_settings() for name in option.metadata["synonyms"]]
    assert len(names) == len(set(names)) == len(SYNONYMS)
    assert not {name.replace("-", "_") for name in names} & options, "those are names of ours"
    assert not {*names} & {*TIMM.instead, *OTHERS.instead}
    assert {name for program in PROGRAMS for name in program.synonyms} <= {*names}


@pytest.mark.parametrize("name", SYNONYMS)
def test_a_synonym_is_answered_with_its_flag_in_each_spelling(name):
    expected = f" (did you mean {FLAG_MEANT[name]}?)"
    for spelling in (f"-{name}",) if len(name) == 1 else (f"--{name}", f"--{name.replace('-', '_')}", name.upper()):
        assert meant(spelling, FLAGS) == expected


# ------------------------------------------------------------------------------------ silent defaults


def unasked(*argv):
    return [line.partition(": ")[2] for line in arguments.read(argv).mistakes if line.startswith("these are flags of")]


def test_what_a_program_does_unasked_is_said_once_when_several_of_its_flags_stand_there():
    line = ["--model", "resnet50", "--sched", "cosine", "--opt", "lamb", "--reprob", "0.1"]
    (said,) = unasked(*line)
    for words in (
        "label smoothing 0.1 (--label-smoothing 0.1)",
        "colour jitter 0.4 (--color-jitter 0.4)",
        "no weight decay on norms, biases and what no_weight_decay() of the network lists (--no-decay-norm-bias)",
        "erasing with noise (--random-erase-mode pixel)",
        "128 images per process (--batch-size 128)",
        "batch-norm statistics averaged over several processes",
    ):
        assert words in said
    assert "Nesterov" not in said, "of sgd"
    (said,) = unasked(*line, "--smoothing", "0", "--aa", "rand-m9", "--remode", "const", "--epochs", "9", "--sync-bn")
    for words in ("smoothing", "--color-jitter 0.4", "erasing", "epochs 300", "batch-norm"):
        assert words not in said
    assert (
        unasked(*["--model", "m", "--data-path", "d", "--output_dir", "o", "--opt", "adamw", "--reprob", "0.25"]) == []
    ), "many scripts'"
    assert unasked("--model", "fc", "--csv", "a") == [] == unasked("--model", "fc", "-j", "4"), "two programs'"
    (said,) = unasked("--lr-scheduler", "steplr", "--lr-warmup-epochs", "5", "--wd", "1e-4")
    assert "--lr-step-epochs 30" in said and "--lr-policy" not in said
    assert "drops that count from its end" in said and "begins at a hundredth" in said
    (said,) = unasked("--wd", "0.1", "--opt", "adamw", "--lr-warmup-epochs", "5", "--lr-warmup-decay", "0.1", "--lr-scheduler", "cosineannealinglr", "--auto-augment", "ra")  # fmt: skip
    assert "count from its end" not in said and "hundredth" not in said
    assert "--arch torchvision/NAME" in said, "--arch resnet50 is timm's"
    assert "a learning rate of 0.1, too (--lr 0.1)" in said and "here nearest" in said
    (said,) = unasked("--test-only", "--train-crop-size", "176", "--wd", "1e-4")
    assert "--lr-policy step" in said and "--lr-step-epochs 30" in said and "weight decay" not in said
    assert "validation at 224 pixels" in said
    (said,) = unasked("model=yolov8n-cls.pt", "data=d", "erasing=0")
    assert "RandAugment (--auto-augment ra)" in said and "--random-erase" not in said


@pytest.mark.parametrize(
    ("command", "program"),
    [
        ("DIR --model resnet50 -b 256 --lr 0.4 -j 8", "timm's"),
        ("--data-dir D --amp-dtype bfloat16", "timm's"),
        ("--experiment foo", "timm's"),
        ("--sched cosine --lr -1e-3 --no-nesterov", "timm's"),
        ("--data-path D --model resnet18 -b 32", "torchvision's"),
        ("DIR -a resnet18 -j 4", None),  # of PyTorch's ImageNet example
        ("DIR --epochs 3", None),
        ("--data-dir D --lr 0.1", None),
    ],
)
def test_a_command_that_one_program_alone_has_is_told_its_defaults(command, program):
    said = [line for line in arguments.read(command.split()).mistakes if line.startswith("these are flags of ")]
    assert [line.split()[4] for line in said] == ([program] if program else [])
    assert all("class folders as the data set (--dataname folder)" in line for line in said)


@pytest.mark.parametrize(
    ("more", "told", "untold"),
    [
        ("", "beyond the last full batch of an epoch (--drop-last)", "no colour jitter"),
        ("--drop-last", "", "--drop-last"),
        ("", "matrix products in float32 (--tf32)", ""),
        ("--amp", "", "--tf32"),
        ("--aa rand-m9", "no colour jitter beside an --aa", "(--color-jitter 0.4)"),
        ("--aa 3a", "(--color-jitter 0.4)", "no colour jitter"),
        ("--kd-model-name resnet50", "labels and teacher each weigh 1", ""),
        ("--kd-model-name resnet50 --distill-loss-weight 1", "", "each weigh 1"),
        ("--sched multistep", "(--lr-milestones 89 179 269)", "(--lr-step-epochs 90)"),
        ("--sched multistep --sched-on-updates", "(--lr-milestones 90 180 270)", "(--lr-milestones 89 179 269)"),
        ("--sched multistep --min-lr 1e-5", "(leave --min-lr out)", ""),
        ("--sched cosine --min-lr 1e-5", "", "(leave --min-lr out)"),
        ("--sched step", "(--lr-step-epochs 90)", "(leave --min-lr out)"),
        ("--reprob 0.25 --mixup 0.2", "random erasing after mixup and CutMix (no equivalent", ""),
        ("--reprob 0.25", "", "random erasing after mixup"),
        ("--cutmix 1", "(--mixup-mode batch)", "random erasing after mixup"),
        ("--sched poly", "(--lr-power 0.1)", ""),
        ("--sched poly --decay-rate 0.5", "", "--lr-power"),
        ("--warmup-prefix", "add them to --epochs", "--no-warmup-prefix"),
        ("--aa augmix", "(--auto-augment augmix-m3)", ""),
        ("--aa augmix-m5", "", "(--auto-augment augmix-m3)"),
        ("--dataset torch/cifar10", "(--augment resized-crop flip)", "--dataname folder"),
        ("--img-size 160", "interpolation, mean and std in timm", "image size in timm"),
        ("--pretrained", "", "mean and std in timm"),
        ("--img-size 32", "here a 3x3 convolution without max-pool", ""),
        ("--model-ema", "batch-norm statistics, too (--ema-bn-batches 0)", "3x3"),
    ],
)
def test_a_default_of_timms_is_told_where_the_command_leaves_it(more, told, untold):
    (line,) = unasked("--experiment", "foo", *more.split())
    assert told in line and (not untold or untold not in line)


def test_what_a_file_of_timms_says_was_not_used_asks_for_nothing(tmp_path):
    used = (
        "model: resnet18\nopt: adamw\nsched: cosine\nwarmup_prefix: false\nmodel_ema: false\nmodel_ema_decay: 0.9998\n"
    )
    (tmp_path / "args.yaml").write_text(used + "pretrained: false\nreprob: 0.0\nmixup: 0.0\namp: false\nvflip: 0.0\n")
    said = "\n".join(arguments.read(["--config", str(tmp_path / "args.yaml")]).mistakes)
    for told in (
        "matrix products in float32 (--tf32)",
        "mean and std in timm",
        "(--no-warmup-prefix)",
        "leave it out for 0",
    ):
        assert told in said
    for untold in ("ema_decay?", "add them to --epochs", "random erasing after mixup", "(--label-smoothing 0.1); 0"):
        assert untold not in said
    assert "to be left out: model_ema, model_ema_decay" in said


def test_a_word_without_a_flag_is_answered_as_the_data_that_it_may_be(tmp_path):
    def answer(word, *more):
        return arguments.read([word, "--lr", "1", *more]).mistakes[0]

    assert answer("DIR").endswith("if it is the data, write --dataname folder --datapath DIR")
    assert answer("DIR", "--dataset", "torch/cifar10").endswith("write --datapath DIR")
    (last,) = arguments.read(["--epochs", "3", "4"]).mistakes
    assert last == "'4' belongs to no flag; remove it or put its flag before it"
    (last,) = arguments.read(["--epochs", "3", str(tmp_path)]).mistakes
    assert last.endswith(f"--dataname folder --datapath {tmp_path}")
    (tmp_path / "train" / "n01440764").mkdir(parents=True)
    assert "--dataname folder" in answer(str(tmp_path)), "Imagenette has this class, too"
    (tmp_path / "train" / "n15075141").mkdir()
    assert "--dataname imagenet" in answer(str(tmp_path))


@pytest.mark.parametrize(
    ("flag", "answer"),
    [
        ("dist-bn", " and has no equivalent: batch-norm statistics are"),
        ("fast-norm", " and has no equivalent: LayerNorm and GroupNorm compute in float32"),
        ("model-dtype", " and has no equivalent: weights and the optimizer's state stay in float32"),
        ("clip-mode", ": write --clip-grad-value instead of --clip-grad for value, --clip-grad-agc for agc"),
        ("kd-distill-type", " and has no equivalent for feature and token"),
        ("model-ema-warmup", " and has no equivalent: after n steps"),
        ("decay-milestones", ": write --lr-milestones with each number less 1"),
    ],
)
def test_a_flag_that_changes_the_result_is_not_said_to_be_left_out(flag, answer):
    assert answers([flag])[flag].startswith(answer)


DOCUMENTED = {
    "EfficientNet-B2": "--data-dir d --model efficientnet_b2 -b 128 --sched step --epochs 450 --decay-epochs 2.4 "
    "--decay-rate .97 --opt rmsproptf --opt-eps .001 -j 8 --warmup-lr 1e-6 --weight-decay 1e-5 --drop 0.3 --drop-path 0.2 "
    "--model-ema-decay 0.9999 --aa rand-m9-mstd0.5 --remode pixel --reprob 0.2 --amp bf16 --lr .016",
    "ViT of another size": "--data-dir d --model vit_base_patch16_clip_224 --img-size 240 --amp bf16 --model-kwargs img_size=240 patch_size=12",
    "ResNet-50 with JSD": "--data-dir d -b 64 --model resnet50 --sched cosine --epochs 200 --lr 0.05 --amp bf16 --remode "
    "pixel --reprob 0.6 --aug-splits 3 --aa rand-m9-mstd0.5-inc1 --resplit --split-bn --jsd --dist-bn reduce",
    "torchvision's MobileNetV2": "--data-path d --model mobilenet_v2 --epochs 300 --lr 0.045 --wd 0.00004 --lr-step-size 1 "
    "--lr-gamma 0.98",
}


@pytest.mark.parametrize("command", DOCUMENTED.values(), ids=DOCUMENTED)
def test_a_documented_command_is_accepted_as_its_answers_say(command):
    """Each flag replaced by the one it is answered with, or left out with its values; then what is done unasked."""
    lines = arguments.read(command.split()).mistakes
    words = []
    for text in re.split(r" (?=-)", command):
        flag, _, values = text.partition(" ")
        answer = next((line for line in lines if line.startswith(f"'{flag}' is not a flag")), f"write {flag}")
        if found := re.search(r"(?:did you mean|write) (-[a-z-]+)", answer):
            words += [found[1], *values.split()]
        else:
            assert "leave it out" in answer or "has no equivalent" in answer
    (said,) = unasked(*command.split())
    words += [word for flags in re.findall(r"\((--.*?)\)", said) for word in flags.split()]
    args = arguments.parse([*words, "--dataname", "folder"])
    assert args.optimisation.opt_eps == (0.001 if "--opt-eps" in command else None)


def test_a_name_of_two_programs_means_what_the_command_is_of():
    assert "(did you mean --ema-decay?)" in meant("--model-ema-decay", FLAGS, ["--sched", "--opt", "--aa"])
    assert "images per step" in meant("--model-ema-decay", FLAGS, ["--lr-warmup-decay", "--val-resize-size"])
    assert "first of its two" in meant("--scale", FLAGS)


@pytest.mark.parametrize("name", ["--model-ema", "--model-ema-decay"])
@pytest.mark.parametrize(
    ("others", "is_torchvisions"),
    [
        ("--model --data-path", True),
        ("--model --lr-scheduler --model-ema --model-ema-decay", True),
        ("--model --output-dir --data-path", True),
        ("--model --data-path --sched --opt --aa", False),  # of a script made from timm's
        ("--model --model-ema --model-ema-decay", False),
    ],
)
def test_a_flag_of_many_scripts_decides_where_no_flag_of_one_program_does(name, others, is_torchvisions):
    assert ("images per step" in meant(name, FLAGS, others.split())) == is_torchvisions


def test_keys_of_timms_yaml_are_answered_as_its_flags_are(recipe):
    path = recipe("lr_base: 0.1\nsmoothing: 0.1\nbn_momentum: 0.1\nscale: [0.5, 1]\n")
    lines = [line.partition(f"{path}: ")[2] for line in arguments.read(["--config", path]).mistakes]
    assert lines[0] == "'smoothing' is not a setting (did you mean label-smoothing?)"
    assert lines[1].startswith("'bn_momentum' is not a setting and has no equivalent")
    assert lines[2].startswith("'scale' is not a setting: write --crop-min-area")
    assert lines[3].startswith("these are flags of timm's train.py") and len(lines) == 4


def test_what_timms_yaml_leaves_unset_is_named_in_one_line_and_gets_no_advice(recipe):
    path = recipe(
        "model: resnet50\nreprob: 0.1\nbce_loss: false\nimg_size: null\nclass_map: c.txt\nfuser: ''\nwandb_tags: []\n"
        "warmup_prefix: true\nmodel_ema: true\nepoch_repeats: 0.0\nlerning_rate: null\n"
    )
    lines = [line.partition(f"{path}: ")[2] for line in arguments.read(["--config", path]).mistakes]
    (unset,) = [line for line in lines if "without a value" in line]
    assert unset.endswith("to be left out: bce_loss, img_size, fuser, wandb_tags")
    said = "\n".join(lines)
    assert "--loss bce" not in said and "max-pool" not in said, "--img-size is not given"
    assert "--ema-bn-batches 0" in said and "'model_ema' is not a setting: write" in said
    assert "'epoch_repeats' is not a setting" in said, "0 is a value"
    assert "'lerning_rate' is not a setting" in said, "no program's"


# ----------------------------------------------------------------------------------------- values

VALUES = [
    (
        "--lr-policy",
        {
            "cosineannealinglr CosineAnnealingLR cos": "(did you mean cosine?)",
            "steplr StepLR": "(did you mean step?)",
            "multisteplr": "(did you mean multistep?)",
            "onecyclelr OneCycleLR": "(did you mean one-cycle?)",
            "polynomiallr polynomial": "(did you mean poly?)",
            "linearlr": "(did you mean linear?)",
            "reducelronplateau ReduceLROnPlateau": "(did you mean plateau?)",
            "tanh": "; no equivalent",
            "exponentiallr": "; write step with --lr-step-epochs 1",
            "cycliclr": "; no equivalent",
            "cosineannealingwarmrestarts cosine_with_restarts": "; write cosine with --lr-cycle-epochs",
            "constant_with_warmup": "; write constant with --warmup-epochs",
            "step multistep cosine poly constant": None,
        },
    ),
    (
        "--auto-augment",
        {
            "randaugment": "(did you mean ra?)",
            "trivialaugment TrivialAugmentWide": "(did you mean ta_wide?)",
            "rand-m9-mstd0.5-inc1 augmix-m3-w3 original-mstd0.5 v0 3a ra ta_wide augmix autoaugment": None,
        },
    ),
    ("--amp", {"float16 half 16-mixed": "(did you mean fp16?)", "bfloat16": "(did you mean bf16?)"}),
    ("--interpolation", {"random lanczos nearest": "; no equivalent", "bicubic": None}),
    (
        "--dataname",
        {
            "torch/cifar10": "(did you mean cifar10?)",
            "torch/image_folder": "(did you mean folder?)",
            "hfds/cats": "; write --dataname hf",
            "wds/cats": "; write --dataname shards",
            "tfds/cats": "; no equivalent",
            "digits": None,
        },
    ),
    (
        "--weights",
        {"ResNet50_Weights.IMAGENET1K_V2 IMAGENET1K_V1 DEFAULT": ": is a name of torchvision's weights", "a.pt": None},
    ),
    ("--amp", {"": "; timm's and torchvision's --amp is --amp fp16, which CPUs emulate slowly; on one, --amp auto"}),
    ("--mixup-mode", {"elem": "; pair is the nearest", "batch": None}),
    ("--val-split", {"validation test": "; timm's --val-split names a split", "0.1": None}),
    ("--tta", {"3": "; timm's is a number of views", "flip": None}),
    ("--device", {"cuda:1 0": "; one GPU of several is --gpu-ids 1", "cuda": None}),
]


@pytest.mark.parametrize(
    ("flag", "value", "expected"),
    [(flag, value, end) for flag, table in VALUES for values, end in table.items() for value in values.split() or [""]],
)
def test_a_value_of_another_program_is_ours_or_answered_with_what_to_write(flag, value, expected):
    more = ("--dataname", "folder", "--datapath", "d") if flag == "--val-split" else ()
    try:
        arguments.parse([flag, *value.split(), *more])
        assert expected is None
    except UserError as error:
        (line,) = error.mistakes
        assert expected is not None and expected in line


@pytest.mark.parametrize(
    ("flag", "value", "answer"),
    [
        ("--sched", "steplr", " (did you mean --lr-policy step?)"),
        ("--sched", "cosine", " (did you mean --lr-policy?)"),
        ("--sched", "plateau", " (did you mean --lr-policy?)"),
        ("--sched", "exp", " (did you mean --lr-policy?); for exp write step with --lr-step-epochs 1"),
        ("--opt", "auto", " (did you mean --optimizer?); auto has no equivalent"),
        ("--opt", "muon", " (did you mean --optimizer?); muon has no equivalent: in timm the last layer"),
        ("--sched", "wsd", " (did you mean --lr-policy?); wsd has no equivalent: multistep is the nearest"),
        (
            "--opt",
            "lookahead_adam",
            " (did you mean --optimizer?); for lookahead_adam write --optimizer adam --lookahead 6 0.5",
        ),
        ("--runs-dir", "None", " (did you mean --output?)"),
    ],
)
def test_a_flag_and_a_value_of_another_program_are_answered_at_once(flag, value, answer):
    assert meant(flag, FLAGS, value=value).startswith(answer)


def test_no_value_that_a_setting_takes_is_answered_with_what_to_write_instead():
    values = other_programs()
    for choices in (set(option.metadata["choices"]) for _, option in all_settings()):
        stale = {value for value, (choice, _) in values.values_instead.items() if choice in choices} & choices
        assert stale == set(), "its row of values_instead in utils/config/other_programs.yaml goes"
        assert choices & {value for value, ours in values.values.items() if ours in choices} == set(), "likewise values"


# ---------------------------------------------------------------------------------------- spelling


def test_the_nearest_spelling_is_asked_for_where_no_other_name_is_known():
    assert meant("--epochz", ["--epochs", "--lr"]) == " (did you mean --epochs?)"
    assert meant("--something", ["--epochs", "--lr"]) == ""
    assert meant("--epcohs", FLAGS) == " (did you mean --epochs?)", "two letters changed places"
    assert meant("--wieght-decya", FLAGS) == " (did you mean --weight-decay?)"
    assert nearest("--ratio", FLAGS) == nearest("--fraction", FLAGS) == [], "no --rotation, though 3 letters of 4 are"
    assert meant_value("mnist/fd", ["mnist/fc", "cifar10/resnet18"]) == " (did you mean mnist/fc?)"
