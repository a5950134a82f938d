"""Mistakes on the tools' command lines: a line each on stderr, exit code 2, no code run, nothing left behind."""

import os
import socket
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from PIL import Image

from scripts import (
    amp_audit,
    amp_walkthrough,
    check_data,
    doctor,
    evaluate,
    explain,
    export,
    features,
    find_lr,
    pack,
    predict,
    report,
    serve,
    sweep,
    verify_resume,
)
from scripts.common.command_line import make_folder, run_tool, warn
from scripts.lab import benchmark, benchmark_amp, collect_results, gpu_results
from tests.faults.small_run import Attack
from tests.helpers import answer, image_tree, png_that_says
from utils.config.settings import UserError

LONG = "x" * 300  # longer than a file system lets a name be
CODE = "io.open; give another"  # which ``Attack`` would call
TOOLS = {tool.NAME.removesuffix(".py"): tool for tool in (evaluate, explain, export, features, predict, report, serve)}
LAB = (benchmark, benchmark_amp, collect_results, gpu_results)
OTHERS = {
    tool.NAME.removesuffix(".py"): tool
    for tool in (amp_audit, amp_walkthrough, check_data, doctor, find_lr, pack, sweep, verify_resume, *LAB)
}  # which take no RUN
WITHOUT_DEVICE = ("export", "lab/collect_results", "lab/gpu_results")  # which have no --device
# What each tool is told beside RUN; that of features.py may be a network's name, too.
REST = {
    "evaluate": "--device cpu --no-progress --output evaluation",
    "explain": "good.png --device cpu --output heat.png",
    "export": "--to safetensors --output exported",
    "predict": "good.png --device cpu --output rows.csv",
    "report": "--device cpu --output report.html",
    "serve": "--device cpu --port 0",
}
# What RUN is, and what the line says of it.
NO_RUNS = {
    "": "must not be empty",
    "a\0b": "NUL",
    "missing": "no such run",
    "empty": "holds no checkpoint",
    "auto": "there is no run",
    "dangling.pt": "no such checkpoint",
    LONG: "no such run",
    "a\nb": "a b: no such run",
    "text.pt": "is not a checkpoint",
    "truncated.pt": "is not a checkpoint",
    "code.pt": CODE,
    "foreign.pt": "does not name its network",
}
# A tool's line after RUN, and what the lines on stderr say.
LINES = (
    ("predict", "none.png", "no such file"),
    ("predict", "@none.txt", "the list cannot be read"),
    ("predict", "@empty.txt --output old.csv", "the list is empty"),
    ("predict", "@empty.txt", "the list is empty"),
    ("predict", "empty", "holds no images"),
    ("predict", "good.png --top-k 0", "--top-k"),
    ("predict", "good.png --top-k 999", "knows only 10 classes"),
    ("predict", "good.png --batch-size 0", "--batch-size"),
    ("predict", "good.png --workers x", "--workers"),
    ("predict", "good.png --amp wrong", "--amp"),
    ("predict", "good.png --output a.txt", "must end with"),
    ("predict", "good.png --output empty --format csv", "is no file"),
    ("predict", "good.png --output /proc/x.csv", "cannot be written"),
    ("predict", "good.png --output good.png/a.csv", "--output good.png/a.csv: cannot be written"),
    ("predict", f"good.png --output {LONG}.csv", "cannot be written (File name too long)"),
    ("explain", "none.png", "no such file"),
    ("explain", "bomb.png", "none of them can be read"),
    ("explain", "good.png --target nine", "knows no such class"),
    ("explain", "good.png --target 30", "--target '30': the network knows no such class; did you mean 3"),
    ("explain", "good.png --target cat", "'cat': the network knows no such class; it has 10, such as 0, 1, 2"),
    ("explain", f"good.png --target {'9' * 5000}", "knows no such class"),
    ("explain", "good.png --output x.jpg", "must be the name of a .png file"),
    ("explain", "good.png --output nowhere/x.png", "its folder does not exist"),
    ("explain", "good.png --output /proc/x.png", "cannot be written"),
    ("explain", f"good.png --output {LONG}.png", "cannot be written (File name too long)"),
    ("evaluate", "--compare missing.pt", "missing.pt: no such run"),
    ("evaluate", "--output good.png", "cannot be made"),
    ("evaluate", "--output ", "--output must not be empty"),
    ("evaluate", f"--output {LONG}", f"--output {LONG}: cannot be made"),
    ("evaluate", "--split test --output new", "--split test: digits has no test images"),
    ("evaluate", "--datapath missing --output new", "--datapath missing: no such folder"),
    ("evaluate", "--datapath animals --output new", "folders that are no classes"),
    ("evaluate", "--split train --datapath animals", "--split train: animals holds no train/"),
    ("evaluate", "--workers many", "--workers 'many'"),
    ("evaluate", "--batch-size 0", "--batch-size: '0': must be at least 1"),
    ("evaluate", "--tta rotate", "--tta"),
    ("report", "--output empty", "must be the name of an .html file"),
    ("report", "--output nowhere/a.html", "its folder does not exist"),
    ("report", "--output folder.html", "or it is a folder itself"),
    ("report", f"--output {LONG}.html", "cannot be written (File name too long)"),
    ("report", "--output report.html --heat-maps --no-predictions", "leave out one of them"),
    ("report", "--output report.html --features --no-predictions", "--features compares other images"),
    ("report", "--no-predictions --datapath empty --split test", "--split chooses", "--datapath chooses images to"),
    ("report", "--output report.html --features --split train", "--features compares other images"),
    ("report", "nowhere empty", "nowhere: no such run", "empty: holds no checkpoint"),
    ("export", "--to exe --output exported", "invalid choice: 'exe'"),
    ("export", "--to onnx --output animals", "exists already"),
    ("export", "--to timm --output good.png", "exists already"),
    ("export", "--to torchvision --output old.pth", "old.json: exists already"),
    ("export", "--to safetensors --output empty/../good.png", "exists already"),
    ("export", "--to onnx --output model.pt2", "give a name that ends in .onnx, or a folder"),
    ("export", "--to timm --output model.safetensors", "give a folder"),
    ("export", "--to safetensors --output good.png/model.safetensors", "cannot be written"),
    ("export", f"--to safetensors --output {LONG}", "cannot be written"),
    ("export", "--to safetensors --output exported --quantise static", "needs --to onnx"),
    (
        "export",
        "--to timm --output exported --with-preprocessing --quantise static",
        "holds weights alone",
        "--quantise static needs --to onnx",
    ),
    ("export", "--to onnx --output a.onnx --calibration-images 8", "--calibration-images 8 needs --quantise static"),
    ("export", "--to onnx --output a.onnx --skip-bad-images", "--skip-bad-images needs --quantise"),
    ("export", "--to safetensors --output exported --images empty", "--images empty: holds no images"),
    ("export", "--to safetensors --output exported --datapath gone", "no such folder"),
    ("serve", "--port 70000", "--port"),
    ("serve", "--host a..b", "cannot listen there"),
    ("serve", "--host no.such.host.invalid", "cannot listen there"),
    ("serve", "--max-megapixels 0", "--max-megapixels"),
    ("serve", "--max-megapixels 179", "--max-megapixels 179: Pillow decodes at most 178 million"),
    ("doctor", "--seconds nothing", "--seconds"),
    ("doctor", "--seconds 0", "--seconds"),
    ("doctor", "--no-such-flag", "'--no-such-flag' is not a flag"),
    ("doctor", "--batch-size 0", "--batch-size"),
    ("doctor", "--output ", "--output"),
    ("doctor", "--arch nonesuch", "--arch 'nonesuch'"),
    ("doctor", "--resume code.pt", CODE),
    ("doctor", "--dry-run", "--dry-run is for main.py; this tool measures anyway: remove it"),
    ("amp_walkthrough", "--evaluate --pretrained --arch resnet18 --image-size 224", "--evaluate is for main.py"),
    ("amp_audit", "--dry-run", "--dry-run is for main.py"),
    ("amp_walkthrough", "--no-such-flag", "'--no-such-flag' is not a flag"),
    ("amp_walkthrough", "--arch nonesuch", "--arch 'nonesuch'"),
    ("amp_walkthrough", "--resume code.pt", CODE),
    ("amp_audit", "--batches none", "--batches: 'none'"),
    ("amp_audit", "--arch resnet19", "resnet18"),
    ("amp_audit", "--batch gone.pt", "--batch gone.pt: no such"),
    ("amp_audit", "--batch foreign.pt", "--dump-bad-batch (it lacks"),
    ("amp_audit", "--batch text.pt", "--batch text.pt: is not a checkpoint"),
    ("amp_audit", "--batch code.pt", CODE),
    ("amp_audit", "--resume code.pt", CODE),
    ("amp_audit", "--arch fc --weights code.pt", CODE),
    ("check_data", "--dataname synthetic", "nothing to check"),
    ("check_data", "--dataname folder", "--datapath"),
    ("check_data", "--dataname folder --datapath gone", "no such folder"),
    ("check_data", "--dataname folder --datapath unfilled", "holds no val/ or test/"),
    ("check_data", "--dataname folder --datapath unfilled/train --val-split 0.5", "holds no images"),
    ("check_data", "--bogus", "'--bogus' is not a flag"),
    ("find_lr", "--start-lr 1 --end-lr 0.1 --picture nowhere/a.png", "--start-lr", "--picture"),
    ("find_lr", "--max-steps 5", "--max-steps is not for find_lr.py; --steps N ends the test"),
    ("find_lr", "--resume auto", "--resume is not for find_lr.py, which reads no run"),
    ("check_data", "--resume auto --dry-run", "--resume is not for check_data.py", "--dry-run is not for"),
    ("pack", "--resume auto --output packed", "--resume is not for pack.py"),
    ("sweep", "digits/fc --set momentun=1", "--set momentun=1: momentun is not a setting (did you mean momentum?)"),
    ("sweep", "digits/fc --set lr", "--set lr: write setting=value,value such as lr=0.05,0.1"),
    ("sweep", "digits/fc --set lr=1,,2", "--set lr=1,,2: write setting=value,value such as lr=0.05,0.1"),
    ("sweep", "digits/fc --set lr=1,1", "--set lr=1,1: a value is given twice"),
    ("sweep", "digits/fc --set lr=0.05 --set lr=0.1", "--set lr is given twice; write lr=0.05,0.1"),
    ("sweep", "digits/fc --set lr=0.05,0.1 --lr=1", "--lr contradicts --set lr=...; remove one"),
    ("sweep", "digits/fc --set optimizer=sgd,adam -oadamw", "--optimizer contradicts --set optimizer=...; remove"),
    ("sweep", "digits/fc --set nesterov=true --no-nesterov", "--nesterov contradicts --set nesterov=...; remove"),
    ("sweep", "digits/fc --set lr=0.1,1e-1", "--set: lr=0.1 and lr=1e-1 may be the same training; leave one out"),
    ("sweep", "digits/fc --set amp=off,auto", "--set: amp=off and amp=auto may be the same training"),
    ("sweep", "digits/fc --set arch=fc,fcc", "--arch 'fcc': no own, timm or torchvision network has this name"),
    ("sweep", "digits/fc --set optimizer=sgd,sgdd", "--optimizer 'sgdd': neither torch nor timm has it"),
    ("sweep", "digits/fc --search 3 --set arch=fc,fcc", "--arch 'fcc': no own, timm or torchvision network has this"),
    ("sweep", "digits/fc --set lr=0.1,fast", "--lr 'fast': must be a number"),
    ("sweep", "digits/fc --set nesterov=1", "--set nesterov=1: the values of --nesterov are true and false"),
    ("sweep", "digits/fc --set seed=1,2", "--seed cannot be varied"),
    ("sweep", "digits/fc --set print-freq=1,2", "--print-freq cannot be varied"),
    ("sweep", "digits/fc --seed 1", "--seed is not for a sweep; remove it"),
    ("sweep", "digits/fc --folds 3 --fold 1", "--fold is not for a sweep; remove it"),
    ("sweep", "digits/fc --folds 3 --set fold-seed=1,2", "--fold-seed cannot be varied"),
    ("sweep", "digits/fc --folds 1", "argument --folds: '1': must be at least 2"),
    ("sweep", "digits/fc --seeds 0", "argument --seeds: '0': must be at least 1"),
    ("sweep", "digits/fc --processes some", "--processes 'some': must be a whole number, or auto"),
    ("sweep", "digits/fx", "--config 'digits/fx': no such recipe or file (did you mean digits/fc?)"),
    ("sweep", "--dataname folder --seeds 2", "RECIPE: folder of --dataname was taken for it; write it first: sweep.py"),
    ("sweep", "digits/fc --search 3", "--search needs --set NAME=LOW..HIGH or --set NAME=VALUE,VALUE, what to search"),
    ("sweep", "digits/fc --search 3 --set lr=1..0.1", "--set lr=1..0.1: the lower end of a range comes first"),
    ("sweep", "digits/fc --search 3 --set lr=0..1:log", "--set lr=0..1:log: a logarithmic range begins above 0"),
    ("sweep", "digits/fc --search 3 --set lr=a..1", "--set lr=a..1: the ends of a range are numbers, such as lr=LOW.."),
    ("sweep", "digits/fc --search 3 --set epochs=1.5..3", "--set epochs=1.5..3: the ends of a range are whole numbers"),
    ("sweep", "digits/fc --search 3 --set lr=0.1", "--set lr=0.1: one value leaves nothing to search; give the flag -"),
    ("sweep", "digits/fc --search 3 --set lr=0.1,1 --set lr=0.1..2", "--set lr is given twice; remove one"),
    ("sweep", "digits/fc --search 3 --set lr=0.1..2 --lr 1", "--lr contradicts --set lr=...; remove one"),
    ("sweep", "digits/fc --search 3 --set lr=-1..2", "--lr '-1': must be"),
    ("sweep", "digits/fc --search 3 --set best-metric=top1,loss", "fix --best-metric"),
    ("sweep", "digits/fc --search 3 --set batch-size=32,64", "--batch-size cannot be varied; vary --global-batch-size"),
    ("sweep", "digits/fc --search 3 --set lr=0.1..1 --early-stopping 2", "--search: --early-stopping would choose the"),
    ("sweep", "digits/fc --search 3 --set lr-policy=step,plateau", "--search: --lr-policy plateau would choose the"),
    ("sweep", "digits/fc --search 3 --set epochs=2..4 --pruner median", "--set varies epochs; leave it out"),
    ("sweep", "digits/fc --set lr=0.1..1", "--set lr=0.1..1: a range needs --search N; list the values instead"),
    ("sweep", "digits/fc --best 2", "--best needs --search N"),
    ("features", "--split test", "--split test: digits has no test images besides"),
    ("features", "--neighbours 0", "--neighbours"),
    ("features", "--no-such-flag", "'--no-such-flag' is not a flag"),
    ("features", "--arch conv2", "--arch: network and preprocessing are those of"),
    ("features", "--resume auto --dry-run", "--resume is for main.py; remove it, and name", "--dry-run is for main.py"),
    ("features", "--crop-pct 0.5", "--crop-pct: network and preprocessing are those of"),
    ("features", "--output /dev/null/folder", "cannot be made"),
    ("features", "--datapath empty", "--datapath needs --dataname, of the images that it holds"),
    ("verify_resume", "--kills 0", "--kills: '0': must be at least 1"),
    ("verify_resume", "--ranks many", "--ranks: 'many': must be a whole number"),
    ("verify_resume", "--workers-cycle 0 -1", "--workers-cycle"),
    ("verify_resume", "--archh fc", "'--archh' is not a flag"),
    ("verify_resume", "--resume auto", "--resume: the tool starts and continues the runs itself"),
    ("verify_resume", "--evaluate --pretrained --arch resnet18 --image-size 224", "--evaluate: the tool starts"),
    ("verify_resume", "--output x", "--output: both runs go to separate folders"),
    ("evaluate", "--distance", "--distance needs --store"),
    ("evaluate", "--store new.pt --split train", "--store contradicts --split train"),
    ("evaluate", "--store dangling.pt", "exists already"),
    ("evaluate", "--store new.txt", "must be the name of a .pt file"),
    ("evaluate", "--store nowhere/new.pt", "its folder does not exist"),
    ("evaluate", "--other-images none", "--other-images none: is no folder"),
    ("evaluate", "--other-images empty", "empty: holds no images"),
    ("evaluate", "--reject-below 80", "must be at most 1"),
    ("evaluate", "--reject-below nan", "must be a finite number"),
    ("find_lr", "--picture a.jpg", "must be the name of a .png file"),
    ("find_lr", "--picture .", "must be the name of a .png file"),
    ("find_lr", "--start-lr 0", "'0': must be"),
    ("pack", "--output new --format keep --resize 64", "--format keep contradicts --resize"),
    ("pack", "--dataname digits --output new --format keep", "--format keep is for files"),
    ("pack", "--output new --resize-validation", "--resize-validation needs --resize"),
    ("pack", "--output new --format png --quality 90", "--quality is for --format jpeg"),
    ("pack", "--verify /nowhere", "holds no shards.json"),
    ("pack", "--verify new --output new --resize 8", "--output contradicts --verify", "--resize contradicts --verify"),
    ("lab/benchmark", "--only speed", "--only: invalid choice: 'speed' (choose from 'loop', 'decode', 'start-up'"),
    ("lab/benchmark", "--rounds 0", "--rounds: '0': must be at least 1"),
    ("lab/benchmark", "--seconds nan", "--seconds: 'nan': must be a finite number"),
    ("lab/benchmark", "--mnist /nowhere --timm-train /no/train.py", "--mnist /nowhere", "--timm-train /no/train.py"),
    ("lab/benchmark", "--output ", "--output"),
    ("lab/benchmark_amp", "--steps 0", "--steps: '0': must be at least 1"),
    ("lab/benchmark_amp", "--width -5", "--width: '-5': must be at least 1"),
    ("lab/benchmark_amp", "--rounds many", "--rounds: 'many': must be a whole number"),
    ("lab/benchmark_amp", "--arch conv2", "--arch goes with --accounting, and this measures the MLP"),
    ("lab/benchmark_amp", "--amp bf16", "--amp goes with --accounting, and this measures the MLP"),
    ("lab/benchmark_amp", "--accounting --layers 2", "--layers goes with the MLP, and this measures --accounting"),
    ("lab/benchmark_amp", "--amp fp8", "--amp: invalid choice: 'fp8'"),
    ("lab/benchmark_amp", "--ema-decay 0.9", "--ema-decay goes with --accounting"),
    ("lab/benchmark_amp", "--accounting --ema-decay 2", "--ema-decay"),
    ("lab/benchmark_amp", "--accounting --arch resnet81", "no own, timm or torchvision network has this name; did you"),
    ("lab/benchmark_amp", "--width 8 --output /dev/null/folder", "cannot be made"),
    ("lab/collect_results", "gone empty", "gone: no such folder"),
    ("lab/gpu_results", "--only speed", "--only: invalid choice: 'speed' (choose from 'tests', 'amp'"),
    ("lab/gpu_results", "--seconds-limit 5", "--seconds-limit"),
    ("lab/gpu_results", "--cifar10 /no/where --timm-train /no/f", "/no/where: no such folder", "/no/f: no such file"),
    ("lab/gpu_results", "--output ", "--output"),
)
# Where each tool that writes is interrupted.
BUSY = {
    "evaluate": "scripts.evaluation.files.write_all",
    "explain": "scripts.common.heat_map.heat_map",
    "export": "scripts.exporting.steps.check",
    "predict": "scripts.predict.rows_of",
    "report": "os.replace",
}
# What runs out of memory, and how many images were computed together.
FULL = {
    "explain": ("scripts.common.heat_map.heat_map", 16),
    "predict": ("scripts.common.predictions.Predictor.logits", 48),
}


@pytest.fixture(scope="module")
def place(digits_run, tmp_path_factory):
    """A folder with what the command lines name."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "empty").mkdir()
    (folder / "dangling.pt").symlink_to("nowhere.pt")
    (folder / "text.pt").write_text("text")
    whole = Path(digits_run, "checkpoints", "last.pt").read_bytes()
    (folder / "truncated.pt").write_bytes(whole[: len(whole) // 2])
    torch.save({"model": Attack("code_has_run")}, folder / "code.pt")
    torch.save({"conv.weight": torch.zeros(3, 3)}, folder / "foreign.pt")
    Image.new("L", (8, 8), 90).save(folder / "good.png")
    for name in ("old.csv", "old.json", "empty.txt"):
        (folder / name).write_text("" if name == "empty.txt" else "old")
    for name in ("folder.html", "unfilled/train/cat"):
        (folder / name).mkdir(parents=True)
    (folder / "bomb.png").write_bytes(png_that_says(60_000, 60_000))
    image_tree(folder / "animals", {"val": 1}, ("cat", "dog"))
    return folder


@pytest.fixture(autouse=True)
def nothing_left_behind(place, monkeypatch):
    """Each test begins in the folder, and leaves it as it was."""
    monkeypatch.chdir(place)
    before = sorted(place.rglob("*"))
    yield
    assert sorted(place.rglob("*")) == before and Path("old.csv").read_text() == Path("old.json").read_text() == "old"


def told(tool, words, monkeypatch, capsys):
    """The exit code, and the lines on stderr but for those about the progress."""
    code, said = answer((TOOLS | OTHERS)[tool], words, capsys, monkeypatch)
    assert tool != "predict" or code != 2 or said.out == "", "not even a header"
    lines = [line for line in said.err.splitlines() if not line.endswith("fc, 10 classes")]
    return code, [
        line for line in lines if not line.startswith(("reading ", "validating ", "warning: ", "measuring: "))
    ]


def test_a_folder_that_a_tool_makes_goes_with_its_failure(monkeypatch, capsys):
    """As on a full disk; the fixture looks for what is left."""
    monkeypatch.setattr("sys.argv", ["tool"])

    def tool(_):
        make_folder("made/inside")
        make_folder("empty")
        raise UserError("--output made/inside: cannot be written (No space left on device)")

    Path("empty").mkdir(exist_ok=True)
    assert run_tool("tool.py", tool) == 2 and "No space left" in capsys.readouterr().err
    assert Path("empty").is_dir() and not Path("made").exists()


def test_a_launchers_variables_silence_no_tool_of_one_process(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["tool"])
    for given, takes_ranks, said in ((("3", "8"), False, 2), (("3", None), True, 2), (("3", "8"), True, 0)):
        for name, value in zip(("RANK", "WORLD_SIZE"), given, strict=True):
            monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)

        def tool(_, took=takes_ranks and None not in given):
            assert ("RANK" in os.environ) is took
            warn("something")
            raise UserError("no", on_all_ranks=True)

        assert run_tool("tool.py", tool, takes_ranks=takes_ranks) == 2
        assert len(capsys.readouterr().err.splitlines()) == said


@pytest.mark.parametrize("tool", REST)
def test_what_is_no_run_is_told_in_a_line(tool, monkeypatch, capsys):
    for run, text in NO_RUNS.items():
        code, lines = told(tool, [run, *REST[tool].split()], monkeypatch, capsys)
        assert (code, len(lines)) == (2, 1), (run, lines)
        assert lines[0].startswith(f"{tool}.py: ") and text in lines[0], (run, lines)


@pytest.mark.parametrize("tool", TOOLS | OTHERS)
def test_what_cannot_be_done_is_told_in_a_line(tool, digits_run, monkeypatch, capsys):
    for line, *texts in [rest for name, *rest in LINES if name == tool]:
        words = [*([digits_run] if tool in TOOLS else []), *line.split(" ")]
        code, lines = told(tool, words + ["--device", "cpu"] * (tool not in WITHOUT_DEVICE), monkeypatch, capsys)
        assert (code, len(lines)) == (2, len(texts)), (line, lines)
        for text, said in zip(texts, lines, strict=True):
            assert said.startswith(f"{tool}.py: ") and text in said, (line, lines)


def test_a_taken_port_and_packages_that_are_missing_are_told_before_any_work(digits_run, monkeypatch, capsys):
    monkeypatch.setattr(serve, "build_service", None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert "cannot listen there" in told("serve", [digits_run, "--port", port], monkeypatch, capsys)[1][0]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for tool, line, needs in (
        ("serve", "", "needs starlette and uvicorn"),
        ("export", "--to onnx --output new", "--to onnx needs onnx, onnxscript, onnxruntime"),
    ):
        code, lines = told(tool, [digits_run, *line.split()], monkeypatch, capsys)
        assert (code, lines) == (2, [f"{tool}.py: {needs}: python -m pip install -r requirements-tools.txt"])


@pytest.mark.parametrize("tool", FULL)
def test_a_batch_that_does_not_fit_is_told_in_a_line(tool, digits_run, monkeypatch, capsys):
    name, together = FULL[tool]
    monkeypatch.setattr(name, Mock(side_effect=torch.OutOfMemoryError("full")))
    code, lines = told(tool, [digits_run, *REST[tool].split()], monkeypatch, capsys)
    assert code == 2 and f"--batch-size {together}: there is not enough memory" in lines[-1]


@pytest.mark.parametrize("tool", BUSY)
def test_an_interruption_leaves_nothing(tool, digits_run, monkeypatch, capsys):
    monkeypatch.setattr(BUSY[tool], Mock(side_effect=KeyboardInterrupt))
    assert told(tool, [digits_run, *REST[tool].split()], monkeypatch, capsys)[0] == 130


def test_links_that_lead_to_themselves_and_names_of_two_lines(digits_run, tmp_path, monkeypatch, capsys):
    for name in ("loop.png", "loop.txt"):
        (tmp_path / name).symlink_to(name)
    Image.new("L", (8, 8), 90).save(tmp_path / "good.png")
    (tmp_path / "two\nlines.png").write_text("text")
    line = [digits_run, tmp_path, "--device", "cpu"]
    code, said = answer(predict, line, capsys, monkeypatch)
    assert code == 1 and "3 images" in said.err
    code, said = answer(explain, [*line, "--output", tmp_path / "heat.png"], capsys, monkeypatch)
    assert code == 1 and len(said.err.splitlines()) == 2, "a line for each file that cannot be read"
