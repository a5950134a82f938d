"""Flags of timm, torchvision, ultralytics and others that are no plain synonyms of ours: what to write instead.

A name that means exactly one of our settings stands in that setting's field (``synonyms``). Here stands the rest, and
what each program does unasked.
"""

from __future__ import annotations

from typing import NamedTuple


class Silent(NamedTuple):
    """What a program does unasked, with the flags that ask for it here.

    Not said where the command has one of the words ``unless``, flags or values, or lacks all of ``needs``.
    """

    words: str
    unless: str
    needs: str = ""


class Program(NamedTuple):
    """A program: its flags that are synonyms, what to do about its other ones, and its silent defaults."""

    title: str
    synonyms: str
    instead: dict[str, str]
    silent: tuple[Silent, ...] = ()


def _each(*rows: tuple[str, str]) -> dict[str, str]:
    return {name: advice for names, advice in rows for name in names.split()}


_RATE = "no equivalent: the learning rate is a function of the step alone"
_AUGMIX = (
    "no equivalent: there is no Jensen-Shannon loss over several views; --auto-augment augmix mixes within an image"
)
_LOADER = "leave it out: the loader does what is fastest by itself"
_TORCHRUN = "leave it out: torchrun tells each process"
_ONE_FOLDER = "write --datapath, the folder that holds train/ and val/, each with a folder a class"
_CLASSES = "leave it out: classes and channels are those of the data"
_LABELS = (
    "no equivalent: labels are the names of folders, one a class (links to the images will do), or a column of "
    "--dataname hf"
)
_FOLD = "no equivalent: a fold is a folder of its own, with links in train/ and val/; --val-split keeps a part aside"
_AVERAGE = "write --ema-decay with the value of --model-ema-decay"
_DETECTION = "no equivalent: it is for detection, segmentation, export or showing images, not for training classifiers"

TIMM = Program(
    "timm's train.py",
    "data-dir dataset dataset-download model initial-checkpoint pretrained-path img-size grad-accum-steps torchcompile "
    "opt clip-grad sched min-lr decay-milestones decay-epochs reprob remode recount smoothing validation-batch-size vb "
    "aa aug-repeats kd-model-name kd-temperature model-ema-decay model-ema-warmup log-interval val-interval amp-dtype "
    "recovery-interval experiment eval-metric input-key target-key j c",
    _each(
        ("scale", "write --crop-min-area with the first of its two numbers; the second is always 1"),
        ("ratio", "no equivalent: the crops of --augment resized-crop have aspect ratios from 3/4 to 4/3"),
        ("hflip", "write --augment resized-crop flip, which flips half of the images; without flip, none"),
        ("vflip", "write --augment resized-crop flip vertical-flip, which turns half of the images upside down"),
        ("no-aug", "write --augment none"),
        ("train-crop-mode", "no equivalent: --augment resized-crop is timm's rrc, and there is no other"),
        ("train-interpolation", "no equivalent: training resizes as validation does, by --interpolation"),
        ("jsd-loss jsd aug-splits split-bn resplit", _AUGMIX),
        ("cutmix-minmax", "no equivalent: the size of the box follows from --cutmix alone"),
        ("input-size", "write --image-size with the last of its numbers"),
        ("in-chans input-img-mode num-classes class-map", _CLASSES),
        ("train-split train-num-samples val-num-samples", "leave it out: train/ and val/ are found and counted"),
        ("dataset-trust-remote-code", "leave it out: no code of a data set is ever run"),
        ("bn-momentum bn-eps", "no equivalent: batch norms keep the values that their network gives them"),
        (
            "dist-bn",
            "leave it out: each validation gives all processes the same batch-norm statistics, those of rank 0",
        ),
        ("drop-connect", "write --drop-path"),
        ("drop-block", "write --model-kwargs drop_block_rate=RATE, which timm's ResNets take"),
        ("gp", "write --model-kwargs global_pool=POOL, which timm's networks take"),
        ("head-init-scale head-init-bias", "no equivalent: the last layer begins as its network does"),
        ("fast-norm fuser synchronize-step device-modules", "leave it out: it changes no result"),
        ("torchcompile-mode torchscript", "no equivalent: --compile is torch.compile as it comes"),
        ("model-dtype", "leave it out: weights are float32; --amp bf16 computes in bfloat16"),
        ("local-rank", f"{_TORCHRUN} its number"),
        ("no-ddp-bb", "no equivalent: all processes get rank 0's buffers in each forward pass, as DDP does by itself"),
        ("pin-mem no-prefetcher use-multi-epochs-loader", _LOADER),
        ("worker-seeding", "leave it out: an image's random numbers are the same with any workers"),
        ("clip-mode", "leave it out for norm; for value write --clip-grad-value, for agc --clip-grad-agc"),
        ("layer-decay-min-scale layer-decay-no-opt-scale", "no equivalent: --layer-decay applies to all layers"),
        ("bce-loss", "write --loss bce"),
        ("decay-rate dr", "write --lr-gamma; with the schedule poly it is the exponent, --lr-power"),
        ("sched-on-updates", "leave it out: the rate changes with each step, unless --lr-per-epoch is given"),
        ("lr-cycle-limit", "write --lr-cycle-epochs with timm's --epochs, and as --epochs this many times that"),
        ("lr-noise lr-noise-pct lr-noise-std lr-k-decay", _RATE),
        ("patience-epochs", f"{_RATE}; --early-stopping ends a run that no longer improves"),
        ("cooldown-epochs", "no equivalent: the schedule ends with --epochs; --lr-min is its lowest rate"),
        ("epoch-repeats", "no equivalent: multiply --epochs and the other durations"),
        ("train-batches-per-epoch train-steps-per-epoch", "no equivalent: an epoch shows each image once"),
        ("start-epoch", "leave it out: --resume goes on where the run was"),
        ("no-resume-opt", "write --weights PATH instead of --resume: a new run begins with these weights"),
        ("model-ema", f"{_AVERAGE} (0.9998 in timm without it)"),
        ("model-ema-force-cpu", "leave it out: the average is where the network is"),
        ("checkpoint-hist", "leave it out: best.pt and last.pt stay, and use no more space as a run goes on"),
        ("save-images", "no equivalent: --picture-epochs shows pictures of the validation in TensorBoard"),
        (
            "log-wandb wandb-project wandb-tags wandb-resume-id",
            "no equivalent: metrics.csv and TensorBoard's files in the run's folder hold the figures",
        ),
        (
            "train-img-sizes train-batch-sizes train-size-probs train-size-schedule train-size-schedule-spread "
            "train-size-random-mix variable-batch-loss-scale",
            "no equivalent: all images of a step have one size; --progressive-size lets it grow",
        ),
        (
            "naflex-loader naflex-train-seq-lens naflex-max-seq-len naflex-patch-sizes naflex-patch-size-probs "
            "naflex-loss-scale naflex-patchify-channels-first",
            "no equivalent: images are square and of one size",
        ),
        (
            "distill-loss-weight task-loss-weight",
            "write --distillation-alpha: the teacher's weight divided by the sum of both; their sum is always 1",
        ),
        ("kd-distill-type kd-loss-type", "leave it out for logit and kl; there is no other"),
        (
            "kd-student-feature-dim kd-teacher-feature-dim kd-token-distill-type",
            "no equivalent: --teacher is compared by its answers alone",
        ),
    ),
    (
        Silent("label smoothing 0.1 (--label-smoothing 0.1)", "smoothing label-smoothing"),
        Silent("colour jitter 0.4 (--color-jitter 0.4)", "color-jitter aa auto-augment no-aug"),
        Silent("no weight decay on norms and biases (--no-decay-norm-bias)", "no-decay-norm-bias"),
        Silent("weight decay 2e-5 (--weight-decay 2e-5)", "weight-decay"),
        Silent("Nesterov momentum in sgd (--nesterov)", "nesterov no-nesterov opt optimizer o"),
        Silent("Nesterov momentum in sgd (--nesterov)", "nesterov no-nesterov", "sgd"),
        Silent("a rate of 0.1 for 256 images (--lr-base 0.1)", "lr lr-base"),
        Silent("5 epochs of warm-up (--warmup-epochs 5)", "warmup-epochs"),
        Silent("from 1e-5 (--warmup-lr 1e-5)", "warmup-lr"),
        Silent("within the schedule (--no-warmup-prefix)", "warmup-prefix no-warmup-prefix sched lr-policy"),
        Silent("within the schedule (--no-warmup-prefix)", "warmup-prefix no-warmup-prefix", "cosine poly"),
        Silent("a rate for each epoch (--lr-per-epoch)", "sched-on-updates lr-per-epoch"),
        Silent("steps of 90 epochs (--lr-step-epochs 90)", "decay-epochs lr-step-epochs", "step"),
        Silent("drops after 90, 180 and 270 epochs", "decay-milestones lr-milestones", "multistep"),
        Silent("300 epochs (--epochs 300)", "epochs"),
        Silent("half the rate in each cycle (--lr-cycle-decay 0.5)", "lr-cycle-decay", "lr-cycle-limit"),
        Silent("float32 (--amp off)", "amp amp-dtype"),
        Silent("erasing with noise (--random-erase-mode pixel)", "remode random-erase-mode", "reprob"),
        Silent("one mix a batch (--mixup-mode batch)", "mixup-mode", "mixup cutmix"),
        Silent("an average that begins at full decay (--no-ema-warmup)", "model-ema-warmup", "model-ema"),
        Silent("temperature 4 (--distillation-temperature 4)", "kd-temperature", "kd-model-name"),
        Silent(
            "the image size, crop and interpolation that timm has for the network, where --image-size, --crop-pct and "
            "--interpolation say nothing",
            "img-size input-size image-size pretrained",
        ),
        Silent("training resized by bilinear or bicubic at random (no equivalent)", "train-interpolation no-aug"),
    ),
)

TORCHVISION = Program(
    "torchvision's references",
    "data-path model opt wd mixup-alpha cutmix-alpha lr-scheduler lr-warmup-epochs lr-step-size output-dir test-only "
    "use-deterministic-algorithms val-crop-size train-crop-size ra-reps j",
    _each(
        (
            "val-resize-size",
            "write --crop-pct with --val-crop-size (224 by default) divided by it, rounded down to four digits, for "
            "example 0.9655 for 232",
        ),
        (
            "norm-weight-decay bias-weight-decay",
            "for 0 write --no-decay-norm-bias, which leaves out all norms and biases, or name them in "
            "--weight-decay-except; other values have no equivalent",
        ),
        (
            "transformer-embedding-decay",
            "for 0 write --weight-decay-except with the embeddings' names, such as class_token '*pos_embedding'; other "
            "values have no equivalent",
        ),
        ("lr-warmup-method", "leave it out for linear; there is no other"),
        ("lr-warmup-decay", "write --warmup-lr with this times the learning rate, for example 0.005 for 0.01 and 0.5"),
        ("start-epoch", TIMM.instead["start-epoch"]),
        ("cache-dataset", "leave it out: the list of image files is kept by itself"),
        ("ra-magnitude", "no equivalent: --auto-augment ra has torchvision's magnitude 9"),
        ("augmix-severity", "no equivalent: --auto-augment augmix has torchvision's severity 3"),
        ("ra-sampler", "leave it out: --repeated-augmentation with the value of --ra-reps (3 by default) says it all"),
        ("world-size dist-url", f"{_TORCHRUN} where the others are"),
        ("model-ema-steps", "leave it out: the average follows each step"),
        (
            "model-ema model-ema-decay",
            "write --ema-decay with 1 - (1 - decay) x images per step / epochs, and --no-ema-warmup: torchvision "
            "scales its decay, 0.99998 by default, which is 0.999966 here at 1024 images and 600 epochs",
        ),
        ("backend use-v2 prototype", "leave it out: it changes how images are read, not what they show"),
        ("apex apex-opt-level", "write --amp fp16"),
        (
            "num-calibration-batches num-observer-update-epochs num-batch-norm-update-epochs post-training-quantize",
            "no equivalent in training: scripts/export.py quantises what is trained",
        ),
    ),
    (
        Silent("a rate that falls to a tenth (--lr-policy step)", "lr-scheduler lr-policy"),
        Silent("steps of 30 epochs (--lr-step-epochs 30)", "lr-step-size lr-step-epochs lr-scheduler lr-policy"),
        Silent("steps of 30 epochs (--lr-step-epochs 30)", "lr-step-size lr-step-epochs", "step steplr"),
        Silent("validation at 224 pixels (--val-image-size 224)", "val-crop-size val-image-size", "train-crop-size"),
        Silent("a rate for each epoch (--lr-per-epoch)", "lr-per-epoch"),
        Silent("weight decay 1e-4 (--weight-decay 1e-4)", "wd weight-decay"),
        Silent("32 images a process (--batch-size 32)", "batch-size b"),
        Silent("90 epochs (--epochs 90)", "epochs"),
        Silent("float32 (--amp off)", "amp apex"),
        Silent("a constant rate in the warm-up (no equivalent)", "lr-warmup-method", "lr-warmup-epochs"),
        Silent("one mix a batch (--mixup-mode batch)", "mixup-mode", "mixup-alpha cutmix-alpha"),
        Silent("in rmsprop eps 0.0316 (--opt-eps 0.0316)", "opt-eps", "rmsprop"),
    ),
)

ULTRALYTICS = Program(
    "ultralytics' yolo",
    "data patience batch imgsz project lr0 dropout erasing save-period",
    _each(
        ("model", "write --arch with a network of timm or torchvision, such as resnet18; yolo's own are not here"),
        ("lrf", "write --lr-min with this times the learning rate, for example 0.0005 for 0.01 and 0.05"),
        ("cos-lr", "write --lr-policy cosine, the default; without it yolo's is --lr-policy linear"),
        ("fliplr", "write --augment resized-crop flip, which flips half of the images; without flip, none"),
        ("flipud", "write --augment resized-crop flip vertical-flip, which turns half of the images upside down"),
        ("scale", "write --crop-min-area with 1 minus it; yolo's 0.5 is 0.5"),
        ("hsv-h hsv-s hsv-v", "write --color-jitter, which takes brightness, contrast, saturation and hue"),
        ("degrees", "write --rotation; yolo's classifiers do not use it"),
        ("mixup cutmix", "leave it out: yolo's classifiers do not use it; --mixup and --cutmix take an alpha"),
        ("freeze", "write --freeze with the names of layers, such as all-but-head"),
        ("pretrained", "write --pretrained for the library's weights, --weights PATH for a file"),
        ("device", "write --device cpu, or --gpu-ids 0 1"),
        ("resume", "write --resume auto, or --resume with the run's folder"),
        ("amp", "write --amp fp16 for true, --amp off for false"),
        ("deterministic compile", "write the flag alone for true, and leave it out for false"),
        (
            "optimizer",
            "write --optimizer with sgd, adam, adamw, adamax, nadam, radam or rmsprop; auto is a guess of yolo's",
        ),
        ("auto-augment", "write --auto-augment ra for randaugment; autoaugment and augmix are the same"),
        ("half", "write --amp fp16"),
        ("cache", "write --loader resident for ram, and leave it out for disk, which is kept by itself"),
        ("fraction", "write --train-samples with a number of images"),
        ("time", "no equivalent: a run lasts --epochs; --max-steps cuts it"),
        ("split", "leave it out: validation is on val/, or test/ without it"),
        ("val save plots verbose exist-ok", "leave it out: that is always so"),
        ("multi-scale", "no equivalent: all images of a step have one size; --progressive-size lets it grow"),
        ("warmup-momentum warmup-bias-lr", "no equivalent: the warm-up is of the learning rate, the same for all"),
        ("nbs", "no equivalent: --accumulate says how many passes make a step"),
        ("cls-pw", "write --class-weights balanced for 1"),
        ("augment", "write --tta flip, which validates on mirror images too"),
        ("task mode", "leave it out: main.py trains a classifier, --evaluate validates it"),
        ("cfg", "write --config"),
        ("translate shear perspective bgr mosaic close-mosaic copy-paste copy-paste-mode", _DETECTION),
        ("single-cls rect overlap-mask mask-ratio save-json conf iou max-det dnn end2end profile", _DETECTION),
        ("source vid-stride stream-buffer visualize agnostic-nms classes retina-masks embed tracker", _DETECTION),
        ("show save-frames save-txt save-conf save-crop show-labels show-conf show-boxes line-width", _DETECTION),
        ("format keras optimize int8 dynamic simplify opset workspace nms box cls dfl pose kobj rle angle", _DETECTION),
    ),
    (
        Silent("pretrained weights (--pretrained)", "pretrained weights"),
        Silent("RandAugment (--auto-augment ra)", "auto-augment"),
        Silent("random erasing 0.4 (--random-erase 0.4)", "erasing random-erase"),
        Silent("crops of half the area or more (--crop-min-area 0.5)", "scale crop-min-area"),
        Silent("pixels from 0 to 1 (--mean 0 0 0 --std 1 1 1)", "mean std"),
        Silent("a linear schedule (--lr-policy linear)", "cos-lr lr-policy"),
        Silent("3 epochs of warm-up (--warmup-epochs 3)", "warmup-epochs"),
        Silent("an optimizer and a rate of its own choice", "optimizer"),
        Silent("no weight decay on norms and biases (--no-decay-norm-bias)", "no-decay-norm-bias"),
        Silent("a moving average (--ema-decay 0.9999)", "ema-decay"),
        Silent("100 epochs (--epochs 100)", "epochs"),
        Silent("16 images a process (--batch-size 16)", "batch batch-size"),
        Silent("clipping at 10 (--clip-grad-norm 10)", "clip-grad-norm"),
    ),
)

OTHERS = Program(
    "other programs",
    "",
    _each(
        ("no-cuda", "write --device cpu"),
        ("dummy", "write --dataname synthetic"),
        ("fast-dev-run", "write --max-steps 1"),
        ("no-amp", "write --amp off"),
        ("fp16", "write --amp fp16"),
        ("bf16", "write --amp bf16"),
        ("fp16-compression bf16-compression", "write --grad-compression bf16"),
        ("csv csv-file train-csv val-csv labels label-file labels-file annotations", _LABELS),
        ("fold folds k-fold kfold n-folds num-folds", _FOLD),
        ("train train-dir traindir train-data val-dir valdir val-data test-dir validation-dir", _ONE_FOLDER),
        ("adam-beta1 adam-beta2 beta1 beta2", "write --opt-betas with both: --opt-betas 0.9 0.999"),
        ("warmup-steps", "write --warmup-epochs with this divided by the steps of an epoch"),
        ("warmup-ratio", "write --warmup-epochs with this times --epochs"),
        ("base-lr blr", "write --lr, or --lr-base if it is for a batch of --lr-base-size images"),
        ("limit-train-batches", "write --train-samples with a number of images, or --max-steps with one of steps"),
        (
            "rank gpu-rank multiprocessing-distributed dist-backend nproc-per-node num-nodes nodes",
            f"{_TORCHRUN} its part",
        ),
        ("do-train do-eval dist-eval model-ema-eval", "leave it out: that is always so"),
        ("no-validate no-val", "write --val-every-epochs with the number of epochs"),
    ),
)

PROGRAMS = (TIMM, TORCHVISION, ULTRALYTICS, OTHERS)
# Of one of these programs, and of many scripts beside: they do not tell which program a command is for.
COMMON = {
    "batch",
    "c",
    "data",
    "data-dir",
    "data-path",
    "dataset",
    "dropout",
    "experiment",
    "j",
    "model",
    "model-ema",
    "model-ema-decay",
    "opt",
    "output-dir",
    "patience",
    "project",
    "start-epoch",
    "world-size",
    "dist-url",
}

# Values of flags: by what they are here, and the rest with one choice of the setting that they belong to.
VALUES = {
    "gpu": "cuda",
    "float16": "fp16",
    "half": "fp16",
    "16": "fp16",
    "16-mixed": "fp16",
    "bfloat16": "bf16",
    "bf16-mixed": "bf16",
    "float32": "off",
    "fp32": "off",
    "32": "off",
    "none": "off",
    "steplr": "step",
    "multisteplr": "multistep",
    "cosineannealinglr": "cosine",
    "cosineannealing": "cosine",
    "cosine-annealing": "cosine",
    "cos": "cosine",
    "linearlr": "linear",
    "polynomiallr": "poly",
    "polynomial": "poly",
    "constantlr": "constant",
    "onecycle": "one-cycle",
    "onecyclelr": "one-cycle",
    "imagefolder": "folder",
    "image-folder": "folder",
    "hflip": "flip",
    "vflip": "vertical-flip",
    "rrc": "resized-crop",
    "torch/mnist": "mnist",
    "torch/cifar10": "cifar10",
    "torch/cifar100": "cifar100",
    "torch/imagenet": "imagenet",
    "randaugment": "ra",
    "trivialaugment": "ta_wide",
    "trivialaugmentwide": "ta_wide",
    "ta": "ta_wide",
}
_PLATEAU = f"{_RATE}; --early-stopping ends a run that no longer improves"
VALUES_INSTEAD = {
    name: (choice, advice)
    for names, choice, advice in (
        ("plateau reducelronplateau reduce-lr-on-plateau", "cosine", _PLATEAU),
        ("tanh", "cosine", "no equivalent: cosine falls alike, from one flat end to another"),
        ("exponentiallr exponential exp", "cosine", "write step with --lr-step-epochs 1, and --lr-gamma"),
        (
            "cosineannealingwarmrestarts cosine-with-restarts cosine-warm-restarts",
            "cosine",
            "write cosine with --lr-cycle-epochs",
        ),
        ("cycliclr", "cosine", "no equivalent: triangular is one such cycle"),
        ("constant-with-warmup", "cosine", "write constant with --warmup-epochs"),
        ("elem", "pair", "pair is the nearest: an image and its partner are mixed alike"),
        ("random", "bilinear", "no equivalent: training and validation resize alike"),
        ("lanczos", "bilinear", "no equivalent: bicubic is the nearest"),
        ("nearest", "bilinear", "no equivalent"),
    )
    for name in names.split()
}
# Flags of ours that other programs give another meaning, said where they have no value, or none of ours.
BARE = {"amp": "timm's and torchvision's --amp is --amp fp16"}
OTHER_MEANING = {
    "val_split": "timm's --val-split names a split: leave it out, val/ or validation/ is found",
    "tta": "timm's is a number of views: flip has 2",
    "device": "one GPU of several is --gpu-ids 1",
}
