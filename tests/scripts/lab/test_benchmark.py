"""scripts/lab/benchmark.py: its arithmetic by hand, its commands on stand-ins, what it prints and leaves. No speed is judged."""

import copy
import itertools
import os
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from scripts.common.timing import Spread
from scripts.lab import benchmark
from scripts.lab.benchmarks import cpu, data, gpu, measure, peers
from scripts.lab.benchmarks.lines import RATE, SECONDS
from scripts.lab.benchmarks.measure import (
    CommandFailure,
    Match,
    Rival,
    compare,
    play,
    run_command,
    throughput,
    warm_images_per_second,
)
from tests.helpers import csv_rows
from tests.utils.data.test_readers import some, write_idx
from utils.config.settings import UserError

CPU = torch.device("cpu")


@pytest.fixture
def own(tmp_path):
    """The command line, completed as ``main`` does."""
    own = benchmark.read_flags(["--seconds", "0.01"])
    more = {"threads": 1, "device": "cpu", "on_cpu": True, "scratch": tmp_path, "environ": dict(os.environ)}
    return SimpleNamespace(**(vars(own) | more))


def figures(*values):
    """A measurement that gives these figures, one a call."""
    return iter(values).__next__


# ------------------------------------------------------------------------------------ the statistics


def test_seconds_are_compared_by_differences_and_without_a_rival_by_themselves():
    assert compare([5.0, 7.0, 6.0], [4.0, 4.5, 4.0], SECONDS) == Spread(2.0, 1.0, 2.5)
    assert compare([3.0, 1.0, 2.0], None, SECONDS) == Spread(2.0, 1.0, 3.0)


def test_play_compares_ours_with_each_rival():
    match = Match("m", RATE, figures(10.0, 12.0), [Rival("r", figures(5.0, 4.0), 2.5), Rival("s", figures(20.0, 40.0))])
    first, second = play(match, rounds=2)
    assert (first.against, first.ours, first.other, first.aim) == ("r", 11, 4.5, 2.5)
    assert (first.result, first.low, first.high) == (2.5, 2, 3)
    assert (second.against, second.result, second.low, second.high, second.aim) == ("s", 0.4, 0.3, 0.5, None)


def test_a_rival_that_fails_spoils_no_other_row_and_is_not_measured_again():
    calls = []

    def fails():
        calls.append(1)
        raise CommandFailure("why")

    rivals = [Rival("broken", fails, 2.0), Rival("r", figures(5.0, 5.0), 0.5)]
    broken, row = play(Match("m", RATE, figures(10.0, 12.0), rivals), rounds=2)
    assert broken.result is None and len(calls) == 1
    assert broken.cells() == ["m (images/s)", "broken", "", "", "", "", "at least 2", "failed: why"]
    assert (row.against, row.result, row.low, row.high) == ("r", 2.2, 2.0, 2.4)
    lines = play(Match("m", RATE, fails, [Rival("r", figures(1.0)), Rival("s")]), rounds=3)
    assert [line.note for line in lines] == ["failed: why", "failed: why"] and len(calls) == 2


def test_throughput_times_neither_the_warm_up_nor_more_than_the_batches_it_counts(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("scripts.lab.benchmarks.measure.time.perf_counter", lambda: now[0])

    def batches():
        for number in itertools.count():
            now[0] += 100.0 if number < 3 else 2.0  # seconds a batch takes: the first three compile
            yield 10

    # 2, 4, 6 seconds: the third batch ends it
    assert throughput(batches(), 5.0, CPU, warm_up=3) == 30 / 6


def test_a_warm_run_is_all_images_over_all_seconds_of_the_epochs_after_the_first(tmp_path):
    (tmp_path / "metrics.csv").write_text("epoch,images_per_second\n1,1\n2,100\n3,50\n", encoding="utf-8")
    # 100 images an epoch in 1 s and in 2 s
    assert warm_images_per_second(tmp_path / "metrics.csv") == pytest.approx(200 / (1 + 2))


def test_given_batches_are_timed_from_the_first_to_the_end_of_the_last_step(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(peers, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    shape = {"batch_size": 8, "channels": 3, "image_size": 4, "classes": 10, "channels_last": True}
    own = SimpleNamespace(device=CPU, given_batches=5, **shape)
    batches = peers.GivenBatches(own, training=True)
    for seconds in (100.0, 2.0, 1.0):  # a step of the first epoch, which compiles, and of two more
        for images, targets in batches:
            assert images.shape == (8, 3, 4, 4) and targets.shape == (8,) and targets.max() < 10
            assert images.is_contiguous(memory_format=torch.channels_last)
            now[0] += seconds
    log = "Train: 1 [ ...  (0.812s,  157.64/s)\n" + capsys.readouterr().out
    assert peers.timm_rate(log, given_batches=True) == pytest.approx(80 / 15)  # 40 images in 10 s and in 5 s
    assert peers.timm_rate(log, given_batches=False) == 157.64
    assert len(list(peers.GivenBatches(own, training=False))) == 1
    assert capsys.readouterr().out == "", "validation is not timed"


# ---------------------------------------------------------------------------------------- commands


def test_warnings_on_stderr_are_no_figures(own, monkeypatch):
    warns = own.scratch / "warns.py"
    warns.write_text("import sys; print('of the network'); print(3); print('TF32', file=sys.stderr)")
    monkeypatch.setattr(measure, "PEERS", warns)
    assert measure.peer(own, "bare")() == 3


def test_a_command_that_ends_otherwise_is_told_with_its_last_line():
    code = "import sys; print('out'); print('the reason', file=sys.stderr); sys.exit(3)"
    assert run_command([sys.executable, "-c", code], os.environ, code=3).startswith("out\n")
    with pytest.raises(CommandFailure, match="exit code 3: the reason"):
        run_command([sys.executable, "-c", code], os.environ)


def test_the_time_to_a_line_is_that_of_the_first_one(monkeypatch):
    code = "print('Run'); print('epoch 1/2 step 1'); print('epoch 1/2 step 2')"
    command = [sys.executable, "-c", code]
    monkeypatch.setattr(cpu, "time", SimpleNamespace(perf_counter=figures(10.0, 12.5, 99.0)))
    assert cpu.seconds_to_line(command, "epoch 1/", os.environ) == 2.5
    monkeypatch.undo()
    with pytest.raises(CommandFailure, match="no 'never' line"):
        cpu.seconds_to_line(command, "never", os.environ)


# -------------------------------------------------------------------------------------------- data


def test_a_folder_without_idx_files_is_the_users_mistake(own, tmp_path):
    own.mnist = str(tmp_path)
    with pytest.raises(UserError, match="--mnist .* holds no train-images"):
        next(cpu.loop(own))


def test_the_small_tree_holds_the_users_own_images_of_every_class(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "TREE_IMAGES", {"train": 20, "val": 10})
    given = tmp_path / "given"
    pixels = {}
    for split, label, number in itertools.product(("train", "test"), range(10), range(3)):
        folder = given / split / f"class{label}"
        folder.mkdir(parents=True, exist_ok=True)
        pixels[split, label, number] = np.full((32, 32, 3), 20 * label + number, np.uint8)
        Image.fromarray(pixels[split, label, number]).save(folder / f"{number}.png")
    root = data.cifar10_tree(str(given), tmp_path)
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


def test_both_mnist_loops_see_each_image_once_an_epoch_normalised_alike(tmp_path):
    write_idx(tmp_path / "mnist", some(40), some(20))
    own = SimpleNamespace(mnist=tmp_path / "mnist", device=CPU, batch_size=16, workers=0)
    epochs = []
    for batches in (peers.mnist_in_memory(own), peers.torchvision_mnist(own)):
        images, targets = (torch.cat(part) for part in zip(*itertools.islice(batches, 3), strict=True))
        assert images.shape == (40, 1, 28, 28)
        order = images.sum((1, 2, 3)).argsort()
        epochs.append((images[order], targets[order]))
    torch.testing.assert_close(epochs[0], epochs[1])


# ------------------------------------------------------------------------------------- parts in here


def test_both_sides_of_a_decoding_row_end_as_normalised_floats_of_one_shape_on_one_thread(own, monkeypatch):
    seen = []
    threads = []

    def look(_, batches):
        [batch] = batches(0)
        seen.append(batch.images if hasattr(batch, "images") else batch[0])
        threads.append(torch.get_num_threads())
        return lambda: 1.0

    monkeypatch.setattr(cpu, "loading", look)
    monkeypatch.setattr(cpu, "BATCH_SIZE", 4)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    before = torch.get_num_threads()
    try:
        assert len(list(cpu.decode(own))) == 3
        assert set(threads) == {1}
        assert torch.get_num_threads() == 2, "as the training loader, which goes by the variable, found it"
    finally:
        torch.set_num_threads(before)
    assert {tuple(batch.shape) for batch in seen} == {(4, 3, 224, 224)}
    dtypes = [batch.dtype for batch in seen]
    assert dtypes.count(torch.uint8) == 1 and dtypes.count(torch.float32) == len(seen) - 1
    seen.pop(dtypes.index(torch.uint8))
    assert all(-2.2 < batch.min() < -1 and 1 < batch.max() < 2.7 for batch in seen)
    pillow, ours = seen[-2:]
    # Evaluation shows the same part of the image on both sides, but for how far the filters reach.
    assert (ours - pillow).abs().mean() < 0.1 * (ours - pillow.roll(20, dims=-1)).abs().mean()


def test_the_time_of_help_is_that_of_a_whole_process(own):
    match = next(cpu.start_up(own))
    [line] = play(match, rounds=1)
    assert (line.what, line.aim) == ("main.py --help", 0.3)
    assert line.result == line.ours > 0.01


# ---------------------------------------------------------------------------------------- on a GPU


def test_both_sides_of_a_gpu_row_get_the_same_network_batch_and_formats(own, monkeypatch):
    commands = []
    monkeypatch.setattr(gpu, "main_run", lambda _, *flags: commands.append(flags) or (lambda: 1.0))
    monkeypatch.setattr(gpu, "peer", lambda _, name, *flags: commands.append((name, *flags)) or (lambda: 1.0))
    own.timm_train, own.cifar10 = "train.py", "DIR"
    matches = [*gpu.in_memory(own, "resnet50", "bf16", compiled=True), *gpu.resident(own)]
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


# ---------------------------------------------------------------------------------------- the tool


def test_what_needs_a_gpu_or_a_cpu_is_skipped_with_a_line(own, tmp_path, capsys):
    with pytest.raises(UserError, match="nothing could be measured"):
        benchmark.main(["--only", "resident", "--device", "cpu", "--output", str(tmp_path)])
    assert "resident is skipped: it needs a GPU" in capsys.readouterr().out
    own.tiny = True
    assert benchmark.unfit("resident", own) == ""
    own.tiny, own.device, own.on_cpu = False, "cuda", False
    assert benchmark.unfit("resident", own) == ""
    assert "measures the CPU" in benchmark.unfit("decode", own)


def test_the_machine_is_named_and_csv_and_table_hold_ratios_differences_and_figures(tmp_path, monkeypatch, capsys):
    def made_up(own):
        yield "something is left out: give --flag"
        yield Match("a ratio", RATE, figures(100.0), [Rival("r", figures(200.0), 0.9)])
        yield Match("a difference", SECONDS, figures(5.0), [Rival("s", figures(4.5), 1.0)])
        yield Match("a figure", SECONDS, figures(1.5), [Rival(target=2.0)])

    monkeypatch.setattr(cpu, "loop", made_up)
    flags = ["--only", "loop", "--rounds", "1", "--device", "cpu", "--output", str(tmp_path / "new" / "folder")]
    assert benchmark.main(flags) == 0
    rows = csv_rows(tmp_path / "new/folder/benchmark.csv")
    assert [float(row["result"]) for row in rows] == [0.5, 0.5, 1.5]
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert f"torch {torch.__version__}" in lines[0] and "thread(s) a side" in lines[0]
    assert "something is left out: give --flag" in lines
    assert "a ratio (images/s) r 100 200 0.500x 0.500x - 0.500x at least 0.9 MISSED" in lines
    assert "a difference (s) s 5 4.5 +0.50 +0.50 - +0.50 at most 1 met" in lines
    assert "a figure (s) 1.5 1.5 1.5 - 1.5 at most 2 met" in lines
