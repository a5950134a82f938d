"""scripts/lab/gpu_results.py: every piece in its tiny form on a CPU, what is taken up again, and how results are read."""

import contextlib
import io
import json
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import timm.data
import torch

import main
from scripts import sweep
from scripts.common.runs import read_run, run_folders
from scripts.lab import benchmark, benchmark_amp, gpu_results
from scripts.lab.benchmarks import data, measure, peers
from scripts.lab.benchmarks.lines import Line
from scripts.lab.gpu_results import OutOfTime
from scripts.lab.gpu_table import airbench, collect
from scripts.lab.gpu_table.collect import figure
from scripts.lab.gpu_table.pieces import PIECES, Piece
from scripts.verification.processes import processes
from tests.helpers import wait_for
from utils.config.settings import UserError

ROOT = Path(__file__).resolve().parents[3]

# As timm's: flags, functions of its package, a loop over its loader, a line of its log.
TIMM_TRAIN = """
    import argparse
    from timm.data import create_dataset, create_loader
    from timm.models import create_model
    parser = argparse.ArgumentParser()
    for flag, kind in {"data-dir": str, "model": str, "num-classes": int, "batch-size": int, "epochs": int}.items():
        parser.add_argument(f"--{flag}", type=kind, required=True)
    parser.add_argument("--input-size", type=int, nargs=3)
    args, others = parser.parse_known_args()
    network = create_model(args.model, num_classes=args.num_classes, in_chans=args.input_size[0])
    images = create_dataset("", root=args.data_dir, split="train", is_training=True)
    assert images is not None
    shape, size = tuple(args.input_size), args.batch_size
    loader = create_loader(images, input_size=shape, batch_size=size, is_training=True, num_workers=0, device="cpu",
                           use_prefetcher=False)
    for epoch in range(args.epochs):
        for number, (batch, targets) in enumerate(loader):
            assert network(batch.float()).shape == (size, args.num_classes) and batch.shape == (size, *shape)
        print(f"Train: {epoch} [   4/5 (100%)]  Loss: 2.3 (2.3)  Time: 0.8s,  159.80/s  (0.812s,  {200 + epoch}.00/s)  LR")
"""
# As airbench's: its images, its table, its number of runs.
AIRBENCH = """
    import torch
    for name in ("train", "test"):
        data = torch.load(f"cifar10/{name}.pt")
        assert data["images"].shape[1:] == (32, 32, 3) and data["images"].dtype == torch.uint8
        assert len(data["labels"]) == len(data["images"]) and len(data["classes"]) == 10

    def row(*cells):
        print("|" + "|".join(f"  {cell}  " for cell in cells) + "|")

    def main(run):
        for epoch in range(2):
            row(run if epoch == 0 else "", epoch, "0.9000", "0.9100", "", 1.5)
        row("", "eval", "0.9000", "0.9300", f"0.94{run if run != 'warmup' else 99:02}", f"{3 + (run == 'warmup') * 50}.25")

    row("run   ", "epoch", "train_acc", "val_acc", "tta_val_acc", "time_seconds")
    main("warmup")
    accs = [main(run) for run in range(200)]
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    """The other programs' scripts, as files."""
    folder = tmp_path_factory.mktemp("others")
    for name, text in {"train.py": TIMM_TRAIN, "airbench94.py": AIRBENCH}.items():
        (folder / name).write_text(textwrap.dedent(text))
    return folder


def in_this_process(patch):
    """Have all programs of this repository run here: starting them takes longer than what they do."""

    def program(words):
        words = [str(word) for word in words][1:]  # without the interpreter
        name = Path(words[0]).name
        flags = words[1:]
        if name == "peers.py":
            return lambda: peers.main(flags)
        commands = {"main.py": main.main, "benchmark.py": benchmark.main, "benchmark_amp.py": benchmark_amp.main}
        return lambda: {**commands, "sweep.py": sweep.main}[name](flags)

    def run_command(command, environ, code=0):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            assert (program(command)() or 0) == code
        return out.getvalue()

    def wait(own, line, log):
        if line[1] == "-m":
            return own_wait(own, line, log)
        with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
            return program(line)()

    def train_all(trials, folder, places, ended, **_):
        for trial in trials:
            flags = [*trial.flags, "--output", str(folder / "runs"), "--resume", "auto", "--no-progress"]
            assert main.main(flags) == 0
            (run_folder,) = run_folders(folder / "runs")
            ended(trial, read_run(run_folder))
        return []

    own_wait = gpu_results.wait
    patch.setattr(gpu_results, "wait", wait)
    patch.setattr(measure, "run_command", run_command)
    patch.setattr(sweep, "run_all", train_all)
    patch.setattr(torch.nn.Module, "compile", lambda module, **_: None)  # as TORCHDYNAMO_DISABLE would
    patch.setattr(sys, "argv", sys.argv)  # and these two: what a timm script changes is put back
    patch.setattr(timm.data, "create_dataset", timm.data.create_dataset)
    patch.setattr(timm.data, "create_loader", timm.data.create_loader)


# The commands of other pieces with other arguments: only the thorough run has them too.
VARIANTS = {"resnet50-fp16", "resnet50-compiled", "vit-small-bf16", "fast-graphs", "jpeg-resnet18", "imagenette"}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param([piece for piece in PIECES if piece.name not in VARIANTS], id="one of each kind"),
        pytest.param(PIECES, id="all", marks=pytest.mark.thorough),
    ],
)
def measured(request, tmp_path_factory, scripts):
    """Pieces in their tiny form: the exit code, what was printed, the folder, and those that need no GPU."""
    folder = tmp_path_factory.mktemp("tiny") / "results"
    out = io.StringIO()
    tests = tmp_path_factory.mktemp("suite")
    (tests / "conftest.py").write_text("def pytest_configure(config): config.addinivalue_line('markers', 'gpu: x')")
    (tests / "test_a.py").write_text(
        "import pytest\n@pytest.mark.gpu\ndef test_one(): pass\n@pytest.mark.gpu\ndef test_two(): assert 1 == 2\n"
    )
    (tests / "test_b.py").write_text("import no_such_package\n")
    flags = ["--tiny", "--output", str(folder), "--timm-train", str(scripts / "train.py")]
    flags += ["--only", *(piece.name for piece in request.param)]
    with pytest.MonkeyPatch.context() as patch:
        in_this_process(patch)
        patch.setattr(gpu_results, "TESTS", tests)
        patch.setattr(data, "TREE_IMAGES", {"train": 20, "val": 10})
        threads = torch.get_num_threads()
        with contextlib.redirect_stdout(out):
            code = gpu_results.main(flags)
        torch.set_num_threads(threads)
    pieces = {piece.name for piece in request.param if piece.tiny is not None}
    return SimpleNamespace(code=code, printed=out.getvalue(), folder=folder, flags=flags, pieces=pieces)


def lines_of(measured, piece):
    found = json.loads((measured.folder / "pieces" / f"{piece}.json").read_text())
    return [Line(*line) for line in found["lines"]]


# ------------------------------------------------------------------------------------------ all pieces


def test_every_piece_runs_in_its_tiny_form_or_says_that_it_needs_a_gpu(measured):
    assert measured.code == 0, measured.printed
    done = {path.stem for path in (measured.folder / "pieces").glob("*.json")}
    assert done == measured.pieces
    assert "airbench94-muon: left out: it needs a GPU" in measured.printed


def test_the_table_has_a_line_for_each_comparison_with_its_aim(measured):
    for part in {"resnet50-fp16", "resnet50-bf16", "resnet50-compiled", "vit-small-bf16"} & measured.pieces:
        bare, graphs, timm_line = lines_of(measured, part)
        assert (bare.against, bare.aim) == ("bare loop, one batch", 0.98)
        assert (timm_line.against, timm_line.aim) == ("timm's train.py, one batch", 1.0)
        assert (graphs.against, graphs.aim) == ("--cuda-graph auto", None)
        assert bare.ours > 0 and bare.other > 0 and timm_line.other > 0 and graphs.other > 0
    resident, graphs = lines_of(measured, "resident")
    assert graphs.against == "--cuda-graph auto"
    assert resident.aim == 0.95 and "CIFAR-10" in resident.what
    amp = {line.what: line for line in lines_of(measured, "amp")}
    assert amp["MLP of PyTorch's AMP recipe, fp16"].aim == 2.44
    (top1, seconds) = lines_of(measured, "resnet18-short")
    assert (top1.aim, seconds.aim) == (95.28, None) and 0 <= top1.ours <= 100
    assert len(lines_of(measured, "fast")) == 4 and lines_of(measured, "fast")[0].aim == 94
    assert [line.against for line in lines_of(measured, "accounting")] == ["bare loop"] * 2


def test_files_are_compared_with_images_in_memory_and_with_timm(measured):
    memory, timm_line = lines_of(measured, "jpeg-resnet50")
    assert memory.against == "images in memory" and memory.other > 0
    assert timm_line.against.startswith("timm's train.py, ") and timm_line.other == 201


def test_the_gpu_tests_are_run_without_importing_other_files_and_failures_are_named(measured):
    count, failed = lines_of(measured, "tests")
    assert (count.ours, count.verdict) == (1, "MISSED")
    assert failed.what == "failed: test_two" and "assert 1 == 2" in failed.note


def test_the_table_holds_all_pieces_which_are_not_measured_again(measured, monkeypatch, capsys):
    page = (measured.folder / "table.md").read_text()
    assert all(f"\n| {piece.name} " in page for piece in PIECES)
    assert f"torch: {torch.__version__.partition('+')[0]}" in page and "at least 0.98" in page
    monkeypatch.setattr(gpu_results, "wait", lambda *_: pytest.fail("nothing is left"))
    assert gpu_results.main(measured.flags) == 0
    printed = capsys.readouterr().out
    assert all(f"{name}: finished before" in printed for name in measured.pieces)
    assert page in printed


# ------------------------------------------------------------------------------- time, cuts, failures


@pytest.fixture
def made_up(monkeypatch, tmp_path):
    """Three pieces that take 100 s each, of which b fails; ``asked`` says what was measured; ``now`` is the clock."""
    state = SimpleNamespace(asked=[], now=0.0, failing="b", commit="aaa")

    def wait(own, words, log):
        state.asked.append(words[1])
        state.now += 100
        print("the reason", file=log)
        return 3 if words[1] == state.failing else 0

    def lines(out):
        if state.failing == "lines":
            raise ZeroDivisionError("the reason")
        return [figure("top-1", "%", [93.0, 95.0], 94.0)]

    made = [Piece(name, f"piece {name}", 100, (name,), lines, resumes=name == "b") for name in "abc"]
    monkeypatch.setattr(gpu_results, "PIECES", made)
    monkeypatch.setattr(gpu_results, "wait", wait)
    monkeypatch.setattr(gpu_results, "has_gpu", lambda: True)
    monkeypatch.setattr(gpu_results, "nvidia_smi", lambda _: "1980 MHz")
    monkeypatch.setattr(gpu_results, "machine", lambda: {"gpu": "H100", "commit": state.commit})
    monkeypatch.setattr(gpu_results, "time", SimpleNamespace(monotonic=lambda: state.now))
    return state


def test_what_does_not_fit_the_limit_is_put_off_and_taken_up_by_the_same_command(made_up, tmp_path, capsys):
    flags = ["--output", str(tmp_path), "--seconds-limit", "250"]
    made_up.failing = ""
    assert gpu_results.main(flags) == 75
    assert made_up.asked == ["a", "b"]
    assert "c: put off: it takes about 100 s, and 30 s are left" in capsys.readouterr().out
    assert gpu_results.main(flags) == 0
    assert made_up.asked == ["a", "b", "c"]
    assert json.loads((tmp_path / "pieces" / "a.json").read_text())["gpu before"] == "1980 MHz"


def test_a_piece_that_resumes_begins_with_less_time_than_it_takes(made_up, tmp_path):
    assert gpu_results.main(["--output", str(tmp_path), "--seconds-limit", "100"]) == 1
    assert made_up.asked == ["b"]  # which fails


def test_figures_of_the_tiny_form_are_never_shown_as_measured(made_up, tmp_path):
    made_up.failing = ""
    assert gpu_results.main(["--output", str(tmp_path), "--tiny", "--cifar10", ".", "--imagenette", "."]) == 0
    with pytest.raises(UserError, match="holds figures of --tiny, which mean nothing"):
        gpu_results.main(["--output", str(tmp_path)])


@pytest.mark.parametrize(
    ("failing", "why"), [("b", "b ended with exit code 3: the reason"), ("lines", "failed: the reason")]
)
def test_a_failed_piece_is_named_and_measured_again_and_other_commits_are_shown(
    made_up, tmp_path, capsys, failing, why
):
    made_up.failing = failing
    assert gpu_results.main(["--output", str(tmp_path)]) == 1
    assert why in capsys.readouterr().out
    assert ("ZeroDivisionError" in (tmp_path / "files/b/log.txt").read_text()) == (failing == "lines")
    failed = 3 if failing == "lines" else 1
    made_up.failing = ""
    made_up.commit = "bbb"
    assert gpu_results.main(["--output", str(tmp_path)]) == 0
    assert len(made_up.asked) == 3 + failed
    a, b, c = [line.strip("| ") for line in (tmp_path / "table.md").read_text().splitlines()[-3:]]
    assert b.endswith("met") and a.endswith("met; with commit aaa" if failed == 1 else "met")


def test_at_the_limit_a_command_and_what_it_started_are_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_results, "SAVING_SECONDS", 0.2)
    code = "import subprocess; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); p.wait()"
    own = SimpleNamespace(tiny=True, scratch=str(tmp_path), deadline=time.monotonic() + 1)
    with pytest.raises(OutOfTime):
        gpu_results.run(own, [sys.executable, "-c", code], tmp_path / "log.txt", (0,))
    child = int((tmp_path / "log.txt").read_text().split()[-1])
    wait_for(lambda: child not in processes(), 2)


# -------------------------------------------------------------------------------------------- reading


def test_airbenchs_runs_are_limited_and_read_without_its_warm_up(scripts, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(data, "TREE_IMAGES", {"train": 100, "val": 10})
    out = tmp_path / "files" / "airbench"
    airbench.main([str(scripts / "airbench94.py"), str(data.cifar10_tree(None, tmp_path)), str(out)])
    (out / "log.txt").write_text(capsys.readouterr().out)
    top1, seconds, cold, *missing = collect.airbench(out, "airbench94.py")
    assert (top1.ours, top1.low, top1.high) == pytest.approx((94.02, 94.0, 94.04))
    assert (seconds.ours, seconds.what) == (3.25, "airbench94.py: its clock")
    assert (cold.ours, len(missing)) == (53.25, 2) and all("no runs" in line.note for line in missing)
    for piece, factor in (("fast", 1), ("fast-graphs", 2)):
        (tmp_path / "files" / piece).mkdir()
        (tmp_path / "files" / piece / "sweep.csv").write_text("folder\nrun\n")
        (tmp_path / "files" / piece / "run").mkdir()
        rows = [f"{epoch},{factor * 50000},{1.5 / factor}" for epoch in (1, 2)]
        text = "\n".join(["epoch,images_per_second,seconds", *rows])
        (tmp_path / "files" / piece / "run" / "metrics.csv").write_text(text + "\n")
    eager, graphs = collect.airbench(out, "airbench94.py", aim=1.0)[3:]
    assert (eager.ours, eager.other, eager.result, eager.verdict) == (2.5, 3.25, 2.5 / 3.25, "met")
    assert graphs.ours == 1.25
    (tmp_path / "other.py").write_text("print('hello')")
    with pytest.raises(SystemExit, match="for run in range"):
        airbench.main([str(tmp_path / "other.py"), "", ""])


def test_airbenchs_clock_counts_training_warmed_up_and_the_last_validation(tmp_path):
    """The first epoch takes 9 s, of which its rate, that of its later steps, tells 2.5; the others train in 2, 1 and 2 s."""
    rows = ["1,98,20000,9.0,", "2,196,25000,2.0,", "3,294,50000,1.0,", "4,392,25000,2.75,10000"]
    table = tmp_path / "metrics.csv"
    table.write_text("epoch,step,images_per_second,seconds,val_count\n" + "\n".join(rows) + "\n")
    assert collect.clocked_seconds(tmp_path) == pytest.approx((2 + (2 + 1 + 2) + 0.75, 9 - 2))
    table.write_text(table.read_text().replace("9.0,", "9.0,10000"))
    assert collect.clocked_seconds(tmp_path)[1] == pytest.approx(9 - 2 - 0.75)


def test_the_recipe_as_a_graph_has_the_published_aim_and_is_held_against_float32_as_it_is(tmp_path):
    columns = "format,images_per_second,speed_up,failure"
    rows = ["fp32,100,1.0,", "fp16,200,2.0,", "fp16 as a graph,250,2.5,", "bf16 as a graph,,,no memory"]
    for folder in ("published", "larger"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "amp.csv").write_text("\n".join([columns, *rows]) + "\n")
    eager, graph, failed, *larger = collect.amp(tmp_path)
    assert (eager.aim, eager.verdict, graph.aim, graph.verdict) == (2.44, "MISSED", 2.44, "met")
    assert (graph.ours, graph.other, failed.note) == (250, 100, "no memory")
    assert all(line.aim is None for line in larger) and len(larger) == 3


def test_a_step_is_held_against_the_gpus_own_work(tmp_path):
    rows = ["bare loop,10,7.7", "bare loop,10,7.7", "step,12,7.5", "step,13,7.5", "graphs,8,7.4", "graphs,8,7.4"]
    (tmp_path / "accounting.csv").write_text(
        "\n".join(["step,ms,busy_ms", *rows, *["with a moving average,9,8"] * 2]) + "\n"
    )
    step, busy, graphs, busy_graphs, *average = collect.accounting(tmp_path)
    assert (step.result, step.aim, busy.ours, busy.other, busy.verdict) == (1.25, None, 12.5, 7.5, "MISSED")
    assert (graphs.result, busy_graphs.result, busy_graphs.aim, busy_graphs.verdict) == (0.8, 8 / 7.4, 1.1, "met")
    assert [line.aim for line in average] == [None, None]


def test_an_aim_is_a_least_rate_or_percentage_and_a_largest_time():
    assert Line("x", "%", result=0.98, aim=0.98).verdict == Line("x", "s", result=1.0, aim=1.0).verdict == "met"
    assert Line("x", "%", result=0.97, aim=0.98).verdict == Line("x", "s", result=1.1, aim=1.0).verdict == "MISSED"
    assert Line("x", result=1.0).verdict == Line("x", aim=1.0, note="why").verdict == ""


def test_a_row_of_the_benchmark_becomes_a_line(tmp_path):
    columns = "part,what,unit,against,ours,other,result,low,high,aim,note"
    failed = "p,net,images/s,timm,,,,,,1.2,no timm"
    measured = "p,net,images/s,bare,98,100,0.98,0.97,0.99,0.98,"
    (tmp_path / "benchmark.csv").write_text("\n".join([columns, measured, failed]) + "\n")
    first, second = collect.benchmark(tmp_path)
    assert (first.result, first.low, first.aim, first.at_least, first.verdict) == (0.98, 0.97, 0.98, True, "met")
    assert (second.result, second.note, second.verdict) == (None, "no timm", "")
    (tmp_path / "benchmark.csv").write_text("\n".join([columns, failed]) + "\n")
    with pytest.raises(ValueError, match="no timm"):
        collect.benchmark(tmp_path)


@pytest.mark.parametrize(
    ("line", "cells"),
    [
        (
            Line("net", "images/s", "bare", 98.0, 100.0, 0.98, 0.97, 0.99, 0.98),
            ["net (images/s)", "bare", "98", "100", "0.980x", "0.970x - 0.990x", "at least 0.98", "met"],
        ),
        (figure("t", "s", [5.0], 0.1), ["t (s)", "", "5", "", "5", "5 - 5", "at most 0.1", "MISSED"]),
        (figure("top-1", "%", [93.0, 95.0], 94.0), ["top-1 (%)", "", "94", "", "94", "93 - 95", "at least 94", "met"]),
        (Line("timm", note="left out"), ["timm", "", "", "", "", "", "", "left out"]),
    ],
)
def test_cells_show_ratios_and_figures(line, cells):
    assert line.cells() == cells


# ----------------------------------------------------------------------------------------- command line


def test_without_a_gpu_only_the_tiny_form_can_be_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="sees no GPU here; --tiny"):
        gpu_results.main(["--output", str(tmp_path)])


@pytest.mark.parametrize(
    "content",
    [
        '{"state"',
        "[]",
        # as an earlier version wrote it
        '{"tiny": false, "machine": {}, "lines": [{"what": "w", "unit": "", "against": "", "ours": 1, "other": 2, '
        '"result": 0.5, "low": 0.4, "high": 0.6, "kind": "ratio", "aim": null, "at_least": true, "note": ""}]}',
    ],
)
def test_a_damaged_or_older_result_is_the_users_to_delete(made_up, tmp_path, content):
    (tmp_path / "pieces").mkdir()
    (tmp_path / "pieces" / "a.json").write_text(content)
    with pytest.raises(UserError, match=r"a\.json: is not a whole result"):
        gpu_results.main(["--output", str(tmp_path)])


def test_the_shell_script_lists_the_pieces_with_what_is_missing():
    line = ["bash", str(ROOT / "scripts" / "lab" / "gpu_results.sh"), "--list"]
    done = subprocess.run(line, capture_output=True, text=True, check=True, timeout=60)
    rows = {line.split()[0]: line for line in done.stdout.splitlines()[2:-1]}
    assert list(rows) == [piece.name for piece in PIECES]
    assert rows["airbench94-muon"].endswith("left out: --cifar10 and --airbench is not given")
    assert list(rows)[:4] == ["tests", "amp", "resnet50-bf16", "fast"], "a GPU's first minutes"
    assert int(done.stdout.split("About ")[1].split()[0]) == round(sum(piece.seconds for piece in PIECES) / 60) <= 70
