"""scripts/lab/benchmark.py: its arithmetic by hand, its commands on stand-ins, what it prints and leaves. No speed is judged."""

import copy
import csv
import itertools
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from scripts.common.timing import Spread
from scripts.lab import benchmark
from scripts.lab.benchmarks import data, decode, gpu, measure, peers, rows, start_up
from scripts.lab.benchmarks.measure import (
    PERCENT,
    RATE,
    SECONDS,
    CommandFailure,
    Match,
    Rival,
    Row,
    Setup,
    compare,
    play,
    run_command,
    throughput,
    warm_data_wait,
    warm_images_per_second,
)
from utils.config.settings import UserError

CPU = torch.device("cpu")


def read_csv(path):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def setup(tmp_path):
    return Setup(seconds=0.01, threads=1, device=CPU, scratch=tmp_path, environ=dict(os.environ))


def figures(*values):
    """A measurement that gives these figures, one a call."""
    return iter(values).__next__


# ------------------------------------------------------------------------------------ the statistics


def test_a_ratio_is_the_median_of_the_rounds_own_ratios_and_not_of_the_medians():
    # ratios 1, 2, 3
    ours = [10, 40, 90]
    other = [10, 20, 30]
    assert compare(ours, other, RATE) == Spread(2, 1, 3)
    # a slow middle round takes both sides: the medians would say 20 / 12
    assert compare([20, 2, 20], [12, 1, 10], RATE) == Spread(2, pytest.approx(20 / 12), 2)


def test_seconds_are_compared_by_differences_and_without_a_rival_by_themselves():
    assert compare([5.0, 7.0, 6.0], [4.0, 4.5, 4.0], SECONDS) == Spread(2.0, 1.0, 2.5)
    assert compare([3.0, 1.0, 2.0], None, PERCENT) == Spread(2.0, 1.0, 3.0)


def test_play_compares_ours_with_each_rival():
    match = Match("m", RATE, figures(10.0, 12.0), [Rival("r", figures(5.0, 4.0), 2.5), Rival("s", figures(20.0, 40.0))])
    first, second = play("part", match, rounds=2)
    assert (first.against, first.ours, first.other) == ("r", Spread(11, 10, 12), Spread(4.5, 4, 5))
    assert first.result == Spread(2.5, 2, 3)
    assert (second.against, second.result, second.target) == ("s", Spread(0.4, 0.3, 0.5), None)


def test_sides_are_measured_alternately_and_every_second_round_backwards():
    order = []
    ticks = []

    def side(name):
        return lambda: order.append(name) or 1.0

    match = Match("m", RATE, side("ours"), [Rival("a", side("a")), Rival("b", side("b"))])
    play("part", match, rounds=2, measured=lambda: ticks.append(1))
    assert order == ["ours", "a", "b", "b", "a", "ours"]
    assert len(ticks) == 6


def test_a_failing_command_becomes_a_row_that_says_so():
    def fails():
        raise CommandFailure("main.py ended with exit code 1: why")

    [row] = play("part", Match("m", RATE, figures(1.0), [Rival("r", fails, 2.0)]), rounds=1)
    assert row.failure and not row.missed
    assert rows.line(row) == "m: failed, main.py ended with exit code 1: why"


def test_a_rival_that_fails_spoils_no_other_row_and_is_not_measured_again():
    calls = []

    def fails():
        calls.append(1)
        raise CommandFailure("why")

    rivals = [Rival("broken", fails, 2.0), Rival("r", figures(5.0, 5.0), 0.5)]
    broken, row = play("part", Match("m", RATE, figures(10.0, 12.0), rivals), rounds=2)
    assert broken.failure == "why" and broken.result is None
    assert (row.against, row.result) == ("r", Spread(2.2, 2.0, 2.4)) and len(calls) == 1
    rows = play("part", Match("m", RATE, fails, [Rival("r", figures(1.0)), Rival("s")]), rounds=3)
    assert [row.failure for row in rows] == ["why", "why"] and len(calls) == 2


@pytest.mark.parametrize(
    ("unit", "median", "target", "missed"),
    [
        (RATE, 0.84, 0.85, True),
        (RATE, 0.85, 0.85, False),
        (SECONDS, 0.31, 0.3, True),
        (SECONDS, 0.29, 0.3, False),
        (PERCENT, 2.1, 2.0, True),
        (RATE, 0.1, None, False),
    ],
)
def test_a_target_is_the_least_ratio_or_the_largest_seconds_and_percent(unit, median, target, missed):
    row = Row("p", "w", unit, "", target, Spread(1, 1, 1), None, Spread(median, median, median))
    assert row.missed is missed
    assert rows.line(row).endswith("  MISSED") is missed


def test_throughput_times_neither_the_warm_up_nor_more_than_the_batches_it_counts():
    now = [0.0]

    def batches():
        for number in itertools.count():
            now[0] += 100.0 if number < 3 else 2.0  # seconds a batch takes: the first three compile
            yield 10

    # 2, 4, 6 seconds: the third batch ends it
    assert throughput(batches(), 5.0, CPU, warm_up=3, clock=lambda: now[0]) == 30 / 6


def test_a_warm_run_is_all_images_over_all_seconds_of_the_epochs_after_the_first(tmp_path):
    (tmp_path / "metrics.csv").write_text("epoch,images_per_second\n1,1\n2,100\n3,50\n", encoding="utf-8")
    assert warm_images_per_second(tmp_path) == pytest.approx(200 / (1 + 2))  # 100 images an epoch in 1 s and in 2 s


def test_the_data_wait_is_read_from_the_log_of_the_epochs_after_the_first(tmp_path):
    lines = [
        f"2026-11-21 05:08:37 epoch {e}/3  step 10/20  9 images/s  data wait {w} %"
        for e, w in ((1, 90), (2, 4), (3, 6))
    ]
    (tmp_path / "log.txt").write_text("\n".join(["Run folder", *lines]), encoding="utf-8")
    assert warm_data_wait(tmp_path) == 5


def test_timms_log_is_read_for_the_average_of_each_epoch():
    line = (
        "Train: 1 [   4/5 (100%)]  Loss: 2.30 (2.31)  Time: 0.801s,  159.80/s  (0.812s,  157.64/s)  LR: 5.000e-02  "
        "Data: 0.010 (0.012)"
    )
    assert peers.TIMM_RATE.findall(line) == [("1", "157.64")]


def test_given_batches_are_timed_from_the_first_to_the_end_of_the_last_step(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(peers, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    options = {"device": CPU, "is_training": True, "batch_size": 8, "input_size": (3, 4, 4)}
    batches = peers.GivenBatches(5, 10, True, options)
    for seconds in (100.0, 2.0, 1.0):  # a step of the first epoch, which compiles, and of two more
        for images, targets in batches:
            assert images.shape == (8, 3, 4, 4) and targets.shape == (8,) and targets.max() < 10
            assert images.is_contiguous(memory_format=torch.channels_last)
            now[0] += seconds
    log = "Train: 1 [ ...  (0.812s,  157.64/s)\n" + capsys.readouterr().out
    assert peers.timm_rate(log, given_batches=True) == pytest.approx(80 / 15)  # 40 images in 10 s and in 5 s
    assert peers.timm_rate(log, given_batches=False) == 157.64
    assert len(list(peers.GivenBatches(5, 10, False, options | {"is_training": False}))) == 1
    assert capsys.readouterr().out == "", "validation is not timed"


# ---------------------------------------------------------------------------------------- commands


def test_a_command_gets_the_number_of_threads_and_warnings_on_stderr_are_no_figures(setup, monkeypatch):
    warns = setup.scratch / "warns.py"
    code = (
        "import os, sys; print('of the network'); print(os.environ['OMP_NUM_THREADS']); print('TF32', file=sys.stderr)"
    )
    warns.write_text(code)
    monkeypatch.setattr(measure, "PEERS", warns)
    assert measure.peer(replace(setup, threads=3), "bare")() == 3


def test_a_command_that_ends_otherwise_is_told_with_its_last_line():
    code = "import sys; print('out'); print('the reason', file=sys.stderr); sys.exit(3)"
    assert run_command([sys.executable, "-c", code], os.environ, code=3).startswith("out\n")
    with pytest.raises(CommandFailure, match="exit code 3: the reason"):
        run_command([sys.executable, "-c", code], os.environ)


def test_the_time_to_a_line_is_that_of_the_first_one(monkeypatch):
    code = "print('Run'); print('epoch 1/2 step 1'); print('epoch 1/2 step 2')"
    command = [sys.executable, "-c", code]
    monkeypatch.setattr(start_up, "time", SimpleNamespace(perf_counter=figures(10.0, 12.5, 99.0)))
    assert start_up.seconds_to_line(command, "epoch 1/", os.environ) == 2.5
    monkeypatch.undo()
    with pytest.raises(CommandFailure, match="no 'never' line"):
        start_up.seconds_to_line(command, "never", os.environ)


# -------------------------------------------------------------------------------------------- data


def test_random_mnist_reads_alike_through_torchvision_and_main(setup, monkeypatch):
    from torchvision.datasets import MNIST

    from utils.data.formats.readers import find_idx, read_idx

    monkeypatch.setattr(data, "IDX_SHAPES", {"train": (40, 28, 28), "t10k": (20, 28, 28)})
    root = data.mnist(None, setup.scratch)
    train, validation, *_ = read_idx(find_idx(root, "MNIST"), None)
    assert (len(train), len(validation)) == (40, 20)
    assert torch.equal(MNIST(str(root)).data, train.pixels[:, 0])
    assert torch.equal(MNIST(str(root)).targets, train.labels)
    assert data.mnist(None, setup.scratch) == root


def test_a_folder_without_idx_files_is_the_users_mistake(setup):
    with pytest.raises(UserError, match="--mnist .* holds no train-images"):
        data.mnist(str(setup.scratch), setup.scratch / "inner")


def test_the_small_tree_holds_the_users_own_images_of_every_class(setup, monkeypatch):
    monkeypatch.setattr(data, "TREE_IMAGES", {"train": 20, "val": 10})
    given = setup.scratch / "given"
    pixels = {}
    for split, label, number in itertools.product(("train", "test"), range(10), range(3)):
        folder = given / split / f"class{label}"
        folder.mkdir(parents=True, exist_ok=True)
        pixels[split, label, number] = np.full((32, 32, 3), 20 * label + number, np.uint8)
        Image.fromarray(pixels[split, label, number]).save(folder / f"{number}.png")
    root = data.cifar10_tree(str(given), setup.scratch)
    files = sorted((root / "train").rglob("*.png"))
    assert len(files) == 20 and len(list((root / "val").rglob("*.png"))) == 10
    stored = [np.asarray(Image.open(path))[0, 0, 0] for path in files]
    assert sorted(stored) == sorted(20 * label + number for label in range(10) for number in range(2))


# ------------------------------------------------------------------------------------ the other sides


def test_the_bare_loop_takes_the_steps_of_plain_sgd(monkeypatch):
    torch.manual_seed(0)
    network = torch.nn.Linear(4, 3)
    twin = copy.deepcopy(network)
    monkeypatch.setattr(peers, "network", lambda own: network)
    batches = [(torch.randn(5, 4), torch.randint(3, (5,))) for _ in range(3)]
    own = SimpleNamespace(device=CPU, amp="off", compile=False)
    assert list(peers.training(own, iter(batches))) == [5, 5, 5]
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4, foreach=False)
    for images, targets in batches:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(twin(images), targets).backward()
        optimizer.step()
    torch.testing.assert_close(network.weight, twin.weight)


def test_both_mnist_loops_see_each_image_once_an_epoch_normalised_alike(setup, monkeypatch):
    monkeypatch.setattr(data, "IDX_SHAPES", {"train": (40, 28, 28), "t10k": (20, 28, 28)})
    own = SimpleNamespace(mnist=data.mnist(None, setup.scratch), device=CPU, batch_size=16, workers=0)
    epochs = []
    for batches in (peers.mnist_in_memory(own), peers.torchvision_mnist(own)):
        images, targets = (torch.cat(part) for part in zip(*itertools.islice(batches, 3), strict=True))
        assert images.shape == (40, 1, 28, 28)
        order = images.sum((1, 2, 3)).argsort()
        epochs.append((images[order], targets[order]))
    torch.testing.assert_close(epochs[0], epochs[1])


# ------------------------------------------------------------------------------------- parts in here


def test_both_sides_of_a_decoding_row_end_as_normalised_floats_of_one_shape_on_one_thread(setup, monkeypatch):
    seen = []
    threads = []

    def look(_, batches):
        [batch] = batches(0)
        seen.append(batch.images if hasattr(batch, "images") else batch[0])
        threads.append(torch.get_num_threads())
        return lambda: 1.0

    monkeypatch.setattr(decode, "loading", look)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    before = torch.get_num_threads()
    try:
        assert len(list(decode.decode(setup))) == 3
        assert set(threads) == {1}
        assert torch.get_num_threads() == 2, "as the training loader, which goes by the variable, found it"
    finally:
        torch.set_num_threads(before)
    assert {tuple(batch.shape) for batch in seen} == {(64, 3, 224, 224)}
    dtypes = [batch.dtype for batch in seen]
    assert dtypes.count(torch.uint8) == 1 and dtypes.count(torch.float32) == len(seen) - 1
    seen.pop(dtypes.index(torch.uint8))
    assert all(-2.2 < batch.min() < -1 and 1 < batch.max() < 2.7 for batch in seen)
    pillow, ours = seen[-2:]
    # Evaluation shows the same part of the image on both sides, but for how far the filters reach.
    assert (ours - pillow).abs().mean() < 0.1 * (ours - pillow.roll(20, dims=-1)).abs().mean()


def test_the_time_of_help_is_that_of_a_whole_process(setup):
    match = next(start_up.start_up(setup))
    [row] = play("start-up", match, rounds=1)
    assert (row.what, row.target) == ("main.py --help", 0.3)
    assert row.result == row.ours and row.ours.median > 0.01


# ---------------------------------------------------------------------------------------- on a GPU


def test_both_sides_of_a_gpu_row_get_the_same_network_batch_and_formats(setup, monkeypatch):
    commands = []
    monkeypatch.setattr(gpu, "main_run", lambda _, *flags, **__: commands.append(flags) or (lambda: 1.0))
    monkeypatch.setattr(gpu, "peer", lambda _, name, *flags: commands.append((name, *flags)) or (lambda: 1.0))
    given = replace(setup, timm_train="train.py", cifar10="DIR")
    matches = [*gpu.in_memory(given, "resnet50", "bf16", compiled=True), *gpu.resident(given)]
    assert [len(match.rivals) for match in matches] == [3, 2]
    for command in commands[:4]:
        said = " ".join(map(str, command))
        for flags in (
            "--arch resnet50",
            "--image-size 224",
            "--batch-size 128",
            "--amp bf16",
            "--channels-last --compile",
        ):
            assert flags in said
    for command in commands[4:]:
        said = " ".join(map(str, command))
        for flags in ("--arch resnet18", "--image-size 32", "--batch-size 512", "--amp fp16", "--channels-last"):
            assert flags in said


def test_the_waits_are_those_of_the_runs_that_gave_the_rates(setup, monkeypatch):
    waits = figures(3.0, 5.0)
    monkeypatch.setattr(gpu, "warm_data_wait", lambda folder: waits())
    monkeypatch.setattr(gpu, "warm_images_per_second", lambda folder: 100.0)
    monkeypatch.setattr(
        gpu, "main_run", lambda _, *flags, read=None: (lambda: read(Path())) if read else (lambda: 200.0)
    )
    monkeypatch.setattr(data, "jpeg_tree", lambda given, scratch: Path("tree"))
    matches = [match for match in gpu.jpeg(setup, "resnet18") if isinstance(match, Match)]
    rows = [row for match in matches for row in play("p", match, 2)]
    assert [(row.unit, row.ours) for row in rows] == [(RATE, Spread(100, 100, 100)), (PERCENT, Spread(4, 3, 5))]
    assert rows[0].result.median == 0.5


# ---------------------------------------------------------------------------------------- the tool


def test_what_needs_a_gpu_or_a_cpu_is_skipped_with_a_line_only_if_it_was_asked_for(setup):
    [(_, line)] = benchmark.matches(["resident"], setup)
    assert line == "resident is skipped: it needs a GPU"
    assert benchmark.unfit("resident", replace(setup, tiny=True)) == ""
    assert benchmark.unfit("resident", replace(setup, device=torch.device("cuda"))) == ""
    assert "measures the CPU" in benchmark.unfit("decode", replace(setup, on_cpu=False))


def test_a_part_prints_the_machine_and_a_row_for_each_comparison_and_leaves_a_file(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(decode, "BATCH_SIZE", 4)
    folder = tmp_path / "new" / "folder"
    flags = ["--only", "decode", "--rounds", "1", "--seconds", "0.01", "--device", "cpu", "--output", str(folder)]
    assert benchmark.main(flags) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"torch {torch.__version__}" in lines[0] and "thread(s) a side" in lines[0]
    rule = next(number for number, line in enumerate(lines) if line.startswith("---"))
    assert all(line.startswith("JPEG to ") for line in lines[rule + 1 : rule + 5])
    rows = read_csv(folder / "benchmark.csv")
    assert len(rows) == 4
    for row in rows:
        assert float(row["result"]) == pytest.approx(float(row["ours"]) / float(row["other"]))


@pytest.fixture
def tool(monkeypatch):
    """The script with one part, which gives made-up figures."""

    def made_up(only, setup):
        yield "loop", "something is left out: give --flag"
        yield "loop", Match("a ratio", RATE, figures(100.0), [Rival("r", figures(200.0), 0.9)])
        yield "loop", Match("a difference", SECONDS, figures(5.0), [Rival("s", figures(4.5), 1.0)])
        yield "loop", Match("a figure", PERCENT, figures(1.5), [Rival(target=2.0)])

    monkeypatch.setattr(benchmark, "matches", made_up)
    return benchmark


def test_csv_and_table_hold_ratios_differences_and_figures(tool, tmp_path, capsys):
    assert tool.main(["--rounds", "1", "--device", "cpu", "--output", str(tmp_path)]) == 0
    rows = read_csv(tmp_path / "benchmark.csv")
    assert [(row["result_is"], float(row["result"]), row["missed"]) for row in rows] == [
        ("ratio", 0.5, "True"),
        ("difference", 0.5, "False"),
        ("figure", 1.5, "False"),
    ]
    printed = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    assert "something is left out: give --flag" in lines
    assert "a ratio (images/s) r 100 200 0.50x 0.50x - 0.50x at least 0.9 MISSED" in lines
    assert "a difference (s) s 5.00 4.50 +0.50 +0.50 - +0.50 at most 1" in lines
    assert "a figure (%) - 1.50 - - 1.50 - 1.50 at most 2" in lines
    assert "Targets missed: 1 of 3" in printed


def test_a_missed_target_fails_only_when_asked(tool, tmp_path):
    flags = ["--rounds", "1", "--device", "cpu", "--output", str(tmp_path)]
    assert tool.main([*flags, "--fail-below-target"]) == 1


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--only", "speed"], ["speed", "start-up"]),
        (["--rounds", "0"], ["--rounds", "at least 1"]),
        (["--seconds", "nan"], ["--seconds", "finite"]),
        (["--mnist", "/nowhere", "--timm-train", "/no/train.py"], ["--mnist /nowhere", "--timm-train /no/train.py"]),
        (["--output", ""], ["--output"]),
    ],
)
def test_mistakes_are_told_in_a_line_each(flags, words):
    with pytest.raises(UserError) as caught:
        benchmark.read_flags(flags)
    assert all(word in " ".join(caught.value.mistakes) for word in words)
