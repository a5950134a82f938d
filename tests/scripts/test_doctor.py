"""scripts/doctor.py: what it decides from given figures, what it measures of parts made slow on purpose, what it prints."""

import csv
import gc
import itertools
import json
import os
import subprocess
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from scripts import doctor
from scripts.common.timing import PEAK_RESET, Spread
from scripts.tuning.advice import (
    Advice,
    Change,
    Hardware,
    Interleaved,
    Largest,
    PartSpeeds,
    TriedChange,
    advice_of,
    changes,
    final_limit,
    ladder,
    largest_batch,
    limit,
    to_measure_again,
)
from scripts.tuning.diagnosis import LEAST_BYTES, Memory, csv_rows, gain, memory_lines, report, trials_table, verdict
from scripts.tuning.measure import TrainingSetup, Window, interleaved_speeds, step_shares
from scripts.tuning.memory import FitsOnCpu, FitsOnGpu, available_bytes
from scripts.tuning.trials import FIRST_PAIRS, STAND_IN_IMAGES, Trials, examine, hardware_of
from tests.end_to_end.forked import Forked
from tests.helpers import computes_in, image_tree
from utils.checkpoint.checkpoint import load_run
from utils.config.settings import UserError
from utils.data import sources
from utils.loop.hooks import Hooks
from utils.loop.step_graph import StepGraphs
from utils.precision import choice
from utils.runtime.distributed import Distributed, RankInfo


@pytest.fixture
def quick(monkeypatch):
    """Nothing to collect where measurements are only pretended, and no GPU to empty."""
    monkeypatch.setattr(gc, "collect", lambda: 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


def exactly(speed):
    return Spread(speed, speed, speed)


def measured(loader, compute, **more):
    split = {"decode": 0.004, "augmentation": 0.001}
    shares = {"forward": 0.3, "backward": 0.6, "optimizer": 0.1}
    settings = {"together": exactly(min(loader, compute)), "wait_percent": 1.0, "split": split, "shares": shares}
    return PartSpeeds(exactly(loader), exactly(compute), **(settings | {"workers": 2} | more))


# ------------------------------------------------------------------------------------- decisions


def test_the_limit_is_the_slower_part_and_in_the_loader_what_takes_longest():
    assert limit(measured(1000, 100)) == "compute"
    assert limit(measured(100, 1000)) == "decode"
    assert limit(measured(100, 110)) == limit(measured(110, 100)) == "both"
    assert limit(measured(100, 1000, split={"decode": 0.004, "augmentation": 0.003})) == "augmentation", "2 workers"
    assert limit(measured(100, 1000, split={"decode": 0.004, "augmentation": 0.001, "copy": 0.01})) == "copy"
    assert limit(measured(100, 1000, split={"read": 0.2, "augmentation": 0.1}, workers=None)) == "read"


def test_a_gpu_that_idles_in_its_steps_is_launch_bound_and_only_where_compute_is_the_limit():
    assert limit(measured(1000, 100, busy=0.3)) == "launch"
    assert limit(measured(1000, 100, busy=0.95)) == "compute"
    assert limit(measured(100, 1000, busy=0.3)) == "decode"


def turns(ratio, varied=1.0):
    """100 images/s and ``ratio`` times as many, the first between itself and ``varied`` times as many."""
    return Interleaved(Spread(100.0, 100.0, 100.0 * varied), exactly(100.0 * ratio), ratio)


def trial(label, ratio, *loop_ratios, group=None, part="compute", varied=1.0, **more):
    change = Change(part, group or label, (f"--{label}",))
    loops = [turns(ratio, varied) for ratio in loop_ratios]
    return TriedChange(change, turns(ratio) if ratio else None, loops, **more)


def test_only_what_gives_more_than_5_percent_is_measured_again_the_best_of_a_group_and_the_limit_first():
    trials = [
        trial("a", 1.04),
        trial("workers 2", 1.3, group="w", part="loader"),
        trial("workers 4", 1.5, group="w", part="loader"),
        trial("b", 1.1),
        trial("c", 2.0),
        trial("d", 3.0, failure="out of memory"),
        trial("e", None),
    ]
    assert [t.change.label for t in to_measure_again(trials, "compute")] == ["--c", "--b", "--workers 4"]
    assert [t.change.label for t in to_measure_again(trials, "decode")] == ["--workers 4", "--c", "--b"]


def test_advised_is_only_what_gave_more_than_5_percent_twice():
    assert trial("a", 1.5, 1.06).helps and trial("a", 1.5, 1.3, 1.06).helps
    assert not trial("a", 1.5, 1.3, 1.04).helps, "not each time in the loop"
    assert not trial("a", 1.5, 1.05).helps, "not again in the loop"
    assert not trial("a", 1.04, 1.5).helps, "not at first"
    assert not trial("a", 1.5).helps, "not measured again"
    assert not trial("a", 1.5, 1.5, failure="out of memory").helps


def test_no_advice_where_speeds_varied_by_more_than_the_gain():
    assert trial("a", 1.5, 1.29, varied=1.25).helps
    assert not trial("a", 1.5, 1.29, varied=1.35).helps, "within its own turns"
    assert not trial("a", 1.5, 1.29, doubts=1.35).helps, "in the loop measured before"
    assert not trial("a", 1.5, 1.6, 1.29, varied=1.35).helps, "in one of two measurements"
    uncertain = trial("loader resident", 13.0, 1.29, part="loader", varied=1.35)
    assert gain(advice_of([uncertain, trial("b", 1.0)], []), exactly(90.0)) == [
        "now 90 images/s; no advice: --loader resident gave 1.29x, but speeds varied by 1.35x; measure again without "
        "other programs, or with more --seconds"
    ]


def test_loader_and_network_that_take_from_each_other_are_the_limit_together():
    """Processes that read share a CPU's cores with the network; without them, or resident, each waits for the other."""
    slow = {"together": exactly(79.0)}
    assert limit(measured(1000, 100, **slow)) == limit(measured(100, 1000, **slow)) == "cores"
    assert limit(measured(1000, 100, workers=0, **slow)) == limit(measured(1000, 100, workers=None, **slow)) == "turns"
    assert limit(measured(1000, 100, together=exactly(81.0))) == "compute", "the loop comes near it"
    disturbed = {"workers": None, "together": exactly(0.79 * 1000 * 100 / 1100)}
    assert limit(measured(1000, 100, **disturbed)) == "compute", "taking turns does not explain it"
    assert limit(measured(1000, 100, gpu=True, **slow)) == "compute", "processes and GPU have nothing to share"
    assert limit(measured(1000, 100, gpu=True, workers=None, **slow)) == "turns"


def test_the_verdict_is_one_with_the_advice():
    compute = trial("amp bf16", 1.5, 1.4)
    loader = trial("loader resident", 9.0, 1.29, 1.27, part="loader")
    found = measured(960, 100)
    assert limit(found) == "compute"

    advice = advice_of([compute, loader], [loader])
    assert final_limit(found, advice) == "cores"
    assert verdict(found, advice) == [
        "Limit: the cores, which loader and network share (960 and 100 images/s alone, 100 together)"
    ]
    (row,) = (row for row in csv_rows(found, advice, Memory(1, "", None, "")) if row["kind"] == "limit")
    assert row["name"] == "cores"
    assert final_limit(measured(960, 100, gpu=True), advice) == "turns"

    on_top = advice_of([compute, loader], [compute, loader], turns(1.8))
    assert final_limit(found, on_top) == "compute"
    assert verdict(found, on_top) == [
        "Limit: compute; the loader could feed 9.6 times as much",
        "With --amp bf16 the loader becomes the limit",
    ]
    decode = measured(100, 1000)
    assert final_limit(decode, advice_of([loader], [loader])) == "decode" and len(verdict(decode, Advice([]))) == 1
    assert final_limit(decode, advice_of([compute], [compute])) == "cores"
    assert final_limit(found, Advice([compute])) == "compute", "without advice the parts alone tell"


def test_all_that_help_are_advised_together_unless_that_is_no_gain():
    a = trial("a", 1.5, 1.3)
    b = trial("b", 1.5, 1.2)
    together = turns(1.5)
    assert advice_of([a, b], [a, b], together).taken == [a.change, b.change]
    assert gain(advice_of([a, b], [a, b], together), exactly(90.0)) == [
        "now 100 images/s, with --a --b 150 images/s (1.50x)"
    ]
    for worse in (turns(1.01), turns(1.5, varied=1.6)):
        assert advice_of([a, b], [a, b], worse) == Advice([a, b], [a.change], turns(1.3))
    nothing = gain(advice_of([a, b, trial("c", None, failure="x")], []), exactly(90.0))
    assert nothing == ["now 90 images/s; none of 2 changes tried gives more than 5 %"]


@pytest.mark.parametrize(
    "workers, cores, tried",
    [
        (2, 2, [1, 4]),
        (0, 1, [1, 2]),
        (0, 8, [1, 2, 4, 8, 16]),
        (2, 8, [1, 4, 8, 16]),
        (8, 8, [4, 16]),
        (16, 2, [1, 2, 4]),
    ],
)
def test_worker_numbers_to_try(workers, cores, tried):
    assert ladder(workers, cores) == tried


def place(**more):
    usual = {
        "gpu": False,
        "cores": 4,
        "threads": 4,
        "workers": 2,
        "batch_size": 64,
        "samples": 1000,
        "resident_bytes": 10,
        "resident_room": 20.0,
        "same_images": True,
        "convolutions": True,
        "channels_last": True,
        "formats": {"bf16": "", "fp16": "emulated"},
        "compiled": False,
        "try_compile": False,
    }
    return Hardware(**(usual | more))


def tried(place):
    """Label and, where it is not tried, the reason."""
    return {change.label: change.not_tried for change in changes(place)}


def test_what_is_tried_fits_the_place():
    cpu = tried(place())
    assert [label for label, reason in cpu.items() if not reason] == [
        "--workers 1",
        "--workers 4",
        "--workers 8",
        "--loader resident",
        "--channels-last off",
        "--amp bf16",
        "--batch-size 128",
        "OMP_NUM_THREADS=1",
        "OMP_NUM_THREADS=2",
    ]
    assert cpu["--amp fp16"] == "emulated" and "--try-compile" in cpu["--compile"]
    assert not tried(place(try_compile=True))["--compile"]
    gpu = tried(place(gpu=True, formats={"bf16": "", "off": ""}))
    assert not gpu["--compile"] and not gpu["--decode gpu"] and not any("OMP" in label for label in gpu)
    resident = tried(place(workers=None, convolutions=False, compiled=True))
    assert not any("workers" in x or "loader" in x or "channels" in x or "compile" in x for x in resident)
    assert "GB" in tried(place(resident_bytes=30))["--loader resident"]
    assert "whole ones" in tried(place(same_images=False))["--loader resident"]
    assert "100 images" in tried(place(samples=100))["--batch-size 128"]


@given(st.integers(0, 3000), st.integers(1, 3000), st.integers(1, 2000))
def test_the_search_finds_exactly_the_largest_batch_that_fits(limit, start, cap):
    asked = []

    def fits(size):
        asked.append(size)
        return size <= limit

    found = largest_batch(fits, start, cap, tolerance=0.0)
    assert found == Largest(min(limit, cap), "an epoch has no more images" if limit >= cap else "")
    assert all(1 <= size <= cap for size in asked) and len(asked) <= 26


def test_the_largest_batch_is_at_most_the_training_set_and_a_long_step_ends_the_search(quick):
    for start in (64, 89):  # doubled, 89 comes near the whole set
        assert largest_batch(lambda size: True, start, 1437) == Largest(1437, "an epoch has no more images")
    found = largest_batch(FitsOnGpu(lambda size: size / 1000, longest_step_seconds=0.5), 64, 10**6)
    assert found == Largest(256, "a step of 512 images would take more than 0.5 s")


def test_on_a_gpu_running_out_of_memory_is_the_answer_no_and_other_errors_are_raised(quick):
    def train(size):
        if size > 700:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return 0.0

    assert 700 / (1 + 1 / 32) <= largest_batch(FitsOnGpu(train, 1.0), 64, 10**6).size <= 700

    with pytest.raises(RuntimeError, match="something else"):
        FitsOnGpu(Mock(side_effect=RuntimeError("something else")), 1.0)(64)


def test_on_a_cpu_no_batch_is_tried_that_is_expected_not_to_fit(quick, monkeypatch):
    trained = []
    memory = SimpleNamespace(peak=0)

    def train(size):
        trained.append(size)
        memory.peak = 5_000 + 100 * size
        return 0.0

    monkeypatch.setattr("scripts.tuning.memory.settled_bytes", lambda: 0)
    monkeypatch.setattr("scripts.tuning.memory.peak_resident_bytes", lambda: memory.peak)
    room = FitsOnCpu(train, 95_000, 1.0)
    assert 900 / (1 + 1 / 32) <= largest_batch(room, 64, 10**6).size <= 900
    assert max(trained) <= 900 and room.grown[64] == 11_400


def test_what_a_control_group_holds_of_files_that_were_read_is_available(tmp_path, monkeypatch):
    """memory.current counts the page cache, which grows to the limit wherever more files are read than fit."""
    for name, content in {
        "memory.max": "8000000",
        "memory.current": "7500000",
        "memory.stat": "anon 1000000\nfile 6500000\nshmem 500000\ninactive_file 4000000\nactive_file 2000000",
    }.items():
        (tmp_path / name).write_text(f"{content}\n")
    monkeypatch.setattr("scripts.tuning.memory.Path", lambda name: tmp_path if "cgroup" in name else Path(name))
    assert available_bytes() == 6_500_000


@pytest.mark.skipif(not os.access(PEAK_RESET, os.W_OK), reason="this system does not let the peak start anew")
def test_a_step_takes_what_it_is_given_of_memory_that_the_process_had_freed_too():
    """glibc keeps freed blocks of 64 kB as long as a later one is in use."""

    def blocks(count):
        return [torch.ones(16_000) for _ in range(count)]

    read = blocks(2_000)
    last = blocks(1)
    del read
    room = FitsOnCpu(lambda size: 0.0 * len(blocks(size)), 10**12, longest_step_seconds=3.0)
    room(1_000)
    assert 63e6 < room.grown[1_000] < 70e6 and len(last) == 1


def test_a_batch_that_has_just_trained_is_not_refused_for_its_long_step(quick):
    tried = []
    room = FitsOnCpu(lambda size: tried.append(size) or 0.05 * size, 10**12, longest_step_seconds=3.0)
    assert room(64)
    assert largest_batch(room, 64, 1437) == Largest(64, "a step of 128 images would take more than 3 s")
    assert tried == [64]


def test_smaller_batches_are_tried_however_long_the_step_was_that_did_not_fit(quick, monkeypatch):
    trained = []
    monkeypatch.setattr("scripts.tuning.memory.settled_bytes", lambda: 0)
    monkeypatch.setattr("scripts.tuning.memory.peak_resident_bytes", lambda: 100 * trained[-1])
    room = FitsOnCpu(lambda size: trained.append(size) or float(size), 2_000, longest_step_seconds=3.0)
    assert not room(64)
    assert largest_batch(room, 64, 1437).size == 16


def test_interleaved_speeds_give_the_median_of_the_pairs_own_ratios():
    order = []

    def side(name, speed):
        def measure(steps, windows):
            order.append(name)
            return [Window(speed * steps, float(steps))]

        return measure

    assert interleaved_speeds(side("a", 100), side("b", 150), 1e-9, 4) == Interleaved(exactly(100), exactly(150), 1.5)
    assert "".join(order[-8:]) == "abbaabba"


# ---------------------------------------------------------------------------------- measurements


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Class folders of small pictures."""
    return image_tree(tmp_path_factory.mktemp("pictures"), {"train": 12, "val": 2}, size=12)


def subject(*flags):
    """A subject as the tool makes it, and what main.py trains with these flags."""
    from components import build
    from utils.run import Run

    args = doctor.settings(["--device", "cpu", *map(str, flags)])
    run = Run(args, Distributed(RankInfo(), args.run))
    parts = build(run)
    traval = doctor.build_traval(run.args, parts, run.distributed)
    epochs = itertools.count(parts.train_loader.full_size_epoch)
    return TrainingSetup(run.args, parts.train_loader, traval, epochs, torch.get_num_threads()), parts


def on_pictures(pictures, *flags):
    small = "--dataname folder --image-size 8 --arch fc --batch-size 4 --workers 0".split()
    return subject(*small, "--datapath", pictures, *flags)


def test_slow_decoding_is_named_as_the_limit(pictures, monkeypatch):
    def slowly(*args, _decode=sources.decode_crop):
        time.sleep(0.05)
        return _decode(*args)

    monkeypatch.setattr(sources, "decode_crop", slowly)
    found, _ = examine(on_pictures(pictures)[0], 0.1)
    assert limit(found) == "decode" and found.wait_percent > 50
    assert "data, reading and decoding" in verdict(found, Advice([]))[0]


def test_a_slow_network_is_named_as_the_limit(pictures):
    slow, _ = on_pictures(pictures)
    slow.traval.model.register_forward_pre_hook(lambda *_: time.sleep(0.1))
    found, peak = examine(slow, 0.1)
    assert limit(found) == "compute" and found.shares["forward"] > 0.5 and peak is None
    assert sum(found.shares.values()) == pytest.approx(1)


def test_shares_of_a_step_know_backward_and_optimizer_apart_and_leave_the_step_as_it_was():
    slow, _ = subject("--arch", "fc", "--accumulate", 2, "--batch-size", 8)
    slow.traval.optimizers[0].register_step_pre_hook(lambda *_: time.sleep(0.2))
    shares = step_shares(slow, 2)
    assert shares["optimizer"] > 0.5 and shares["forward"] > 0 and shares["backward"] > 0
    assert slow.traval.hooks == Hooks()


def test_a_step_that_a_graph_may_stand_for_has_no_shares():
    graphs, _ = subject("--arch", "fc", "--batch-size", 8)
    graphs.traval.launcher = StepGraphs(graphs.traval)
    assert step_shares(graphs, 2) == {}


def test_all_parts_are_measured_on_images_of_the_size_with_which_training_ends():
    grows, _ = subject("--arch", "conv2a", "--progressive-size", 4, "--epochs", 8, "--progressive-epochs", 2, 5)
    shapes = set()
    grows.traval.model.register_forward_pre_hook(lambda _, inputs: shapes.add(tuple(inputs[0].shape[1:])))
    grows.measure_compute(1, 2)
    grows.measure_loop(1, 2)
    assert shapes == {(1, 8, 8)}


@pytest.mark.parametrize("flags", [(), ("--workers", 1), ("--accumulate", 3)])
def test_every_window_holds_its_steps_and_no_image_is_counted_twice(pictures, flags):
    one, _ = on_pictures(pictures, *flags)
    step = one.step_images
    assert step == (12 if "--accumulate" in flags else 4)
    for measure in (one.measure_loader, one.measure_loop, one.measure_compute):
        windows = measure(2, 4)  # crosses epochs of 6 or 2 steps
        assert [window.images for window in windows] == [2 * step] * 4
        assert all(0 <= window.waited <= window.seconds for window in windows)


def test_every_window_holds_as_many_fetches_as_steps(pictures, monkeypatch):
    one, _ = on_pictures(pictures)
    fetched = []
    marks = []
    begin = one._begin_window
    batches = one.loader.batches
    monkeypatch.setattr(
        one.loader, "batches", lambda *place: (fetched.append(0) or batch for batch in batches(*place)), raising=False
    )
    monkeypatch.setattr(one, "_begin_window", lambda: marks.append(len(fetched)) or begin())
    one.measure_loop(2, 2)  # within an epoch
    assert marks == [2, 4, 6], "the first batch of a window is fetched before it, as that of the next is in it"


def test_measuring_takes_each_image_of_an_epoch_once_and_leaves_the_weights_nearly_where_they_were(pictures):
    one, _ = on_pictures(pictures)
    before = [parameter.detach().clone() for parameter in one.traval.model.parameters()]
    seen = [index for passes in one._feed(6) for batch in passes for index in batch.indices]
    assert sorted(seen) == list(range(24))
    assert [sum(len(batch.indices) for batch in passes) for passes in one._feed(2)] == [4, 4], "an epoch's last two"
    one.measure_compute(50, 1)
    for old, new in zip(before, one.traval.model.parameters(), strict=True):
        torch.testing.assert_close(old, new.detach(), rtol=0, atol=1e-2)


@pytest.mark.parametrize("units", [True, False])
def test_the_place_is_that_of_the_settings(units, pictures, monkeypatch):
    monkeypatch.setattr("scripts.tuning.trials.has_bf16_units", lambda: units)
    now, parts = on_pictures(pictures)
    found = hardware_of(now, parts.data, try_compile=True)
    assert (found.workers, found.batch_size, found.samples, found.convolutions) == (0, 4, 24, False)
    assert (found.gpu, found.same_images, found.compiled, found.try_compile) == (False, False, False, True)
    assert found.resident_bytes == 28 * 3 * 8 * 8
    emulated = "emulated on this CPU"
    assert found.formats == {"bf16": "" if units else emulated, "fp16": emulated}


def test_each_change_is_built_as_its_flags_say(pictures):
    now, parts = on_pictures(pictures)

    def variant(*flags, part="compute", threads=None):
        change = Change(part, "x", tuple(map(str, flags)), threads)
        return doctor.build_variant(flags_of_now, parts, now.traval.distributed, now, (change,))

    flags_of_now = "--device cpu --dataname folder --image-size 8 --arch fc --batch-size 4 --workers 0".split()
    flags_of_now += ["--datapath", str(pictures), "--augment", "flip"]
    workers = variant("--workers", 2, part="loader")
    assert (now.workers, workers.workers) == (0, 2) and workers.traval is now.traval
    resident = variant("--loader", "resident", part="loader")
    assert resident.workers is None and len(resident.loader.source) == 24
    assert len(resident.loader.source.pixels) == STAND_IN_IMAGES, "no file is decoded for it"
    assert resident.measure_loader(1, 1)[0].images == 4
    assert variant("--batch-size", 8).step_images == 8
    last = variant("--channels-last", "on")
    assert last.passes[0].images.is_contiguous(memory_format=torch.channels_last)
    assert last.loader.source is now.loader.source and last.traval is not now.traval
    half = variant("--amp", "bf16")
    assert computes_in(half.traval) == torch.bfloat16
    assert variant(threads=3).threads == 3
    with pytest.raises(UserError):
        variant("--batch-size", 8, "--global-batch-size", 4)


def variant_and_memory(*flags):
    """What main.py trains with these flags, a variant of it, and what the search for the largest batch trains."""
    flags = ["--device", "cpu", "--batch-size", "8", *map(str, flags)]
    now, parts = subject(*flags)
    change = Change("compute", "channels", ("--channels-last", "off"))
    variant = doctor.build_variant(flags, parts, now.traval.distributed, now, (change,))
    searched = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("scripts.tuning.memory.train_on_random", lambda traval, *_: searched.append(traval) or 0.0)
        doctor.training_on_random(now.args, parts.data, parts.criterion, now.traval.distributed)(8)
    return parts, variant.traval, searched[0]


def test_variants_and_the_search_for_the_largest_batch_freeze_recompute_and_judge_as_main_does(monkeypatch):
    monkeypatch.setattr(choice, "has_bf16_units", lambda: True)
    monkeypatch.setattr(choice, "seconds_of_passes", lambda *_: (1.0, 0.5))
    frozen = ("--freeze", "all-but-head", "--freeze-bn")
    flags = ("--arch", "test_resnet", "--grad-checkpointing", *frozen, "--class-weights", "balanced", "--amp", "auto")
    parts, *others = variant_and_memory(*flags)

    def trained(model):
        return {name for name, parameter in model.named_parameters() if parameter.requires_grad}

    assert 0 < len(trained(parts.model)) < len(list(parts.model.parameters()))
    assert parts.criterion.weights is not None
    assert parts.model.grad_checkpointing
    for traval in others:
        assert trained(traval.model) == trained(parts.model) and traval.model.grad_checkpointing
        assert traval.attachments[0].freezing.norms == parts.network.freezing.norms
        assert traval.criterion is parts.criterion
        assert computes_in(traval) == torch.bfloat16


def test_layers_that_are_frozen_in_some_epochs_train_in_what_is_measured():
    parts, *others = variant_and_memory("--arch", "conv2", "--freeze", "all-but-head", "--unfreeze-epoch", "5")
    for model in (parts.model, *(traval.model for traval in others)):
        assert all(parameter.requires_grad for parameter in model.parameters())


def test_the_process_that_measures_memory_trains_as_the_one_that_started_it(monkeypatch, capsys):
    built = []
    build = doctor.build_traval
    monkeypatch.setattr(doctor, "build_traval", lambda *given: built.append(build(*given)) or built[-1])
    flags = "--device cpu --image-size 32 --batch-size 2 --amp auto --class-weights balanced"
    args = doctor.settings(flags.split())
    task = {"measured": {"amp": "bf16"}, "room": 10**12, "seconds": 60.0, "largest": False}
    assert doctor.print_memory(task, args, Distributed(RankInfo(), args.run)) == 0
    step_bytes = json.loads(capsys.readouterr().out.splitlines()[-1])["step_bytes"]
    weights = sum(parameter.nbytes for parameter in built[0].model.parameters())
    if os.access(PEAK_RESET, os.W_OK):
        assert step_bytes > 3 * weights > LEAST_BYTES, "with gradients and momentum"
    assert computes_in(built[0]) == torch.bfloat16
    assert built[0].criterion.weights is not None


def test_the_memory_of_a_step_is_measured_with_several_labels_an_image_too(tmp_path, capsys):
    for number in range(4):
        Image.new("RGB", (8, 8), (60 * number, 0, 0)).save(tmp_path / f"{number}.png")
    table = tmp_path / "labels.csv"
    table.write_text("path,label,split\n0.png,a;b,train\n1.png,b,train\n2.png,c,train\n3.png,c,val\n")
    flags = ["--device", "cpu", "--dataname", "folder", "--datapath", tmp_path, "--labels", table, "--arch", "fc"]
    args = doctor.settings([*map(str, flags), "--label-separator", ";", "--image-size", "8", "--batch-size", "2"])
    task = {"measured": {}, "room": 10**12, "seconds": 60.0, "largest": True}
    assert doctor.print_memory(task, args, Distributed(RankInfo(), args.run)) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["largest"]["size"] == 3


def test_an_epoch_of_fewer_images_than_there_are_limits_the_batches(capsys):
    flags = ("--arch", "fc", "--train-samples", "5", "--batch-size", "2")
    now, parts = subject(*flags)
    assert hardware_of(now, parts.data, try_compile=False).samples == 5
    args = doctor.settings(["--device", "cpu", *flags])
    task = {"measured": {}, "room": 10**12, "seconds": 60.0, "largest": True}
    assert doctor.print_memory(task, args, Distributed(RankInfo(), args.run)) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["largest"]["size"] == 5


class Pretended:
    """A subject in which every part has one speed."""

    device = torch.device("cpu")

    def __init__(self, speed):
        self.speed = speed

    def measure_loader(self, steps, windows):
        return [Window(self.speed * steps, float(steps))] * windows

    measure_compute = measure_loop = measure_loader


def test_a_change_that_cannot_be_is_told_and_the_others_are_tried(quick):
    def variant(before, chosen):
        if "--amp" in chosen[-1].flags:
            raise UserError("--amp bf16: no")
        if "--batch-size" in chosen[-1].flags:
            raise torch.OutOfMemoryError("out of memory")
        return before

    advice = Trials(Pretended(100), variant, measured(1000, 100), 0.02).advise(place())
    outcome = {trial.change.label: trial.failure for trial in advice.trials}
    assert outcome["--amp bf16"] == "impossible: --amp bf16: no" and outcome["--batch-size 128"] == "out of memory"
    assert outcome["--loader resident"] == "" and outcome["--amp fp16"] == "not tried: emulated"
    assert advice.taken == [] and advice.gain is None


def test_an_error_that_is_no_affair_of_the_changes_is_raised(quick):
    variant = Mock(side_effect=RuntimeError("a defect"))
    with pytest.raises(RuntimeError, match="a defect"):
        Trials(Pretended(100), variant, measured(1000, 100), 0.02).advise(place())


def test_changes_that_help_come_on_top_of_each_other_and_are_measured_together(quick):
    asked = []

    def variant(before, chosen):
        asked.append([change.label for change in chosen])
        return Pretended(before.speed * {"--amp bf16": 2.0, "--batch-size 128": 1.5}.get(chosen[-1].label, 1.0))

    advice = Trials(Pretended(100), variant, measured(1000, 100), 0.02).advise(place())
    assert [change.label for change in advice.taken] == asked[-1] == ["--amp bf16", "--batch-size 128"]
    assert advice.gain == Interleaved(exactly(100), exactly(300), 3)


@pytest.mark.parametrize(
    ("speeds", "loops", "advised"),
    [
        ((1000, 100), [turns(1.29), turns(1.27)], True),
        ((1000, 100), [turns(1.29), turns(1.01)], False),
        ((1000, 100), [turns(1.29, varied=1.35)], False),
        ((100, 1000), [turns(1.29)], True),
        ((100, 1000), [turns(1.29, varied=1.35)], False),
    ],
    ids=["compute, twice", "compute, once", "compute, unsteady", "data", "data, unsteady"],
)
def test_a_loader_change_is_measured_twice_where_compute_is_the_limit(quick, monkeypatch, speeds, loops, advised):
    planted = iter(loops)

    def measure(before, after, seconds, pairs):
        alone = pairs == FIRST_PAIRS
        return next(planted) if not alone else turns(13.0 if after.__self__ is resident else 1.0)

    now = Pretended(100)
    resident = Pretended(100)
    monkeypatch.setattr("scripts.tuning.trials.interleaved_speeds", measure)
    trials = Trials(now, lambda _, chosen: resident if "resident" in chosen[-1].flags else now, measured(*speeds), 0.02)
    advice = trials.advise(place())
    assert [change.label for change in advice.taken] == ["--loader resident"] * advised
    assert next(planted, None) is None, "each planted measurement was asked for"
    lines = verdict(measured(*speeds), advice) + gain(advice, exactly(100.0))
    assert ("compute" in lines[0]) == (speeds == (1000, 100) and not advised), "one verdict"
    assert ("loader resident" in lines[1]) == (loops[-1].ratio > 1.05)


# ---------------------------------------------------------------------------------------- telling


def test_the_report_has_its_parts_the_verdict_first_and_the_rows_the_same_figures():
    found = measured(300, 100, gpu=True, busy=0.9)
    yes = trial("yes", 2.0, 1.5)
    no = trial("no", 1.0)
    advice = advice_of([yes, no, TriedChange(Change("compute", "c", ("--c",)), failure="out of memory")], [yes])
    memory = Memory(10**6, "as measured", Largest(512), "10 GB")
    text = report("Here", found, advice, memory, batch_size=64, step_images=256)  # --accumulate 4
    assert text.startswith("Limit: compute; the loader could feed 3.0 times as much\nnow 100 images/s, with --yes 150")
    for line in ("Here", "loader alone, 2 worker(s)", "  backward", "both together", "  data wait", "out of memory"):
        assert any(row.startswith(line) or row.endswith(line) for row in text.splitlines()), line
    gpu_line = next(line for line in text.splitlines() if line.startswith("  the GPU computes"))
    assert gpu_line.split()[-3:] == ["2,304.00", "90", "%"]
    loader_line = next(line for line in text.splitlines() if line.startswith("loader alone"))
    assert loader_line.split()[-1] == "853.33", "256 images at 300 a second"
    rows = list(csv_rows(found, advice, memory))
    assert len({tuple(row) for row in rows}) == 1, "the same columns in all"
    by_name = {row["name"]: row for row in rows}
    assert by_name["compute"]["median"] == 100 and by_name["--yes"]["loop_ratio"] == 1.5
    assert by_name["--c"]["value"] == "out of memory" and by_name["largest batch"]["value"] == 512


def test_each_limit_has_a_verdict():
    def said(*speeds, **more):
        return verdict(measured(*speeds, **more), Advice([]))

    assert said(100, 100) == ["Limit: loader and network about equally (100 and 100 images/s)"]
    assert "computes for 30 %" in said(400, 100, gpu=True, busy=0.3)[0]
    assert "4.0 times as much" in said(100, 400)[0]
    assert "varied" in said(400, 100, together=Spread(100, 80, 110))[1]
    assert said(400, 100, together=exactly(75), workers=0)[0].startswith("Limit: loader and network, which take turns")


def test_a_trial_that_another_beats_is_told_from_one_without_gain():
    text = trials_table(
        [trial("a", 2.0), trial("b", 1.0), trial("c", 2.0, 1.0), trial("d", 2.0, 2.0), trial("e", 2.0, 1.2, varied=1.3)]
    )
    assert [line.rpartition("  ")[2] for line in text.splitlines()[2:]] == [
        "another is better",
        "no gain",
        "no gain in the loop",
        "yes",
        "uncertain: speeds varied by 1.30x",
    ]


def test_the_largest_batch_is_told_with_what_ended_the_search():
    memory = Memory(10**8, "growth", Largest(0), "8 GB")
    assert memory_lines(memory, 64)[1] == "Largest batch: none fits into 8 GB"
    stopped = Memory(10**8, "growth", Largest(512, "why"), "8 GB")
    assert memory_lines(stopped, 64)[1] == "Largest batch: 512 images fit into 8 GB; larger ones were not tried: why"
    assert len(memory_lines(Memory(10**8, "growth", None, ""), 64)) == 1


def test_a_step_that_makes_the_process_no_larger_does_not_take_0_bytes():
    small = Memory(0, "growth", None, "")
    assert memory_lines(small, 64) == ["Memory: a training step with --batch-size 64 takes less than 1 MB (growth)"]
    (row,) = [row for row in csv_rows(measured(300, 100), Advice([]), small) if row["kind"] == "memory"]
    assert row["value"] == "less than 1 MB"


@pytest.mark.parametrize(
    ("code", "figures", "lines"),
    [
        (-9, "", ["Memory: unknown: the process was killed, most likely because memory ran out"]),
        (-15, "", ["Memory: unknown: the process was ended by signal 15"]),
        (
            1,
            '{"step_bytes": 2000000}\n',
            [
                "Memory: a training step with --batch-size 64 takes 2 MB (growth of a process's largest resident size over "
                "building and training)",
                "Largest batch: unknown: the process ended with code 1: RuntimeError: why",
            ],
        ),
    ],
)
def test_a_process_that_fails_to_measure_memory_costs_its_rows_and_nothing_else(monkeypatch, code, figures, lines):
    ended = subprocess.CompletedProcess([], code, f"a line of the log\n{figures}", "Traceback\nRuntimeError: why\n")
    monkeypatch.setattr(doctor.subprocess, "run", lambda *_, **__: ended)
    own, flags = doctor.build_parser().parse_known_args(["--device", "cpu"])
    memory = doctor.memory_in_child(own, doctor.settings(flags), flags)
    assert memory_lines(memory, 64) == lines
    values = [row["value"] for row in csv_rows(measured(300, 100), Advice([]), memory) if row["kind"] == "memory"]
    assert values == [memory.step_bytes or memory.failure, memory.failure]


# --------------------------------------------------------------------------------- the whole tool


def test_no_network_is_left_when_the_largest_batch_is_searched_for(monkeypatch):
    """What is left would take memory of the GPU from it."""
    networks = []
    build = doctor.build_traval

    def noted(*parts):
        traval = build(*parts)
        networks.append(weakref.ref(traval.model))
        return traval

    monkeypatch.setattr(doctor, "build_traval", noted)
    own, flags = doctor.build_parser().parse_known_args(["--device", "cpu", "--arch", "fc", "--seconds", "0.01"])
    with Distributed(RankInfo(), doctor.settings(flags).run) as distributed:
        found = doctor.measure(own, doctor.settings(flags), flags, distributed)
        gc.collect()
        assert len(networks) > 1 and [network() for network in networks] == [None] * len(networks)
    assert found.loader.image_shape == (1, 8, 8)


def test_the_whole_tool_prints_a_report_and_writes_only_where_it_is_told_to(tmp_path, monkeypatch, capsys):
    def forked(line, **_):
        process = Forked(*line[2:], program=line[1])
        out, err = process.communicate()
        return subprocess.CompletedProcess(line, process.returncode, out, err)

    monkeypatch.setattr(doctor, "subprocess", SimpleNamespace(run=forked))
    monkeypatch.chdir(tmp_path)
    flags = ["--arch", "fc", "--seconds", "0.02", "--device", "cpu", "--output", str(tmp_path / "new" / "folder")]
    assert doctor.main(flags) == 0
    out, err = capsys.readouterr()
    assert out.startswith("Limit: ") and "\nnow " in out and "fc on digits" in out
    for part in ("loader alone, resident", "compute alone", "both together", "--amp bf16", "Memory:", "Largest batch:"):
        assert part in out
    assert "Memory: unknown" not in out
    assert [line for line in err.splitlines() if line.startswith("measuring:")][1:4] == [
        "measuring: loader alone",
        "measuring: compute alone",
        "measuring: both together",
    ]
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["doctor.csv", "doctor.txt"]
    assert (tmp_path / "new/folder/doctor.txt").read_text(encoding="utf-8") in out
    with open(tmp_path / "new/folder/doctor.csv", newline="", encoding="utf-8") as file:
        assert {"speed", "trial, compute", "memory"} <= {row["kind"] for row in csv.DictReader(file)}


def test_the_settings_of_a_run_count_but_not_its_weights_or_its_end(digits_run):
    args = doctor.settings(["--resume", digits_run, "--max-steps", "3", "--batch-size", "32"])
    assert (args.run.resume, args.run.max_steps, args.data.batch_size) == (None, None, 32)
    run = load_run(Path(digits_run, "checkpoints/last.pt"))["settings"]
    assert (args.model.arch, args.average.ema_decay) == (run["arch"], run["ema_decay"]) == ("fc", 0.9)


def test_a_fresh_network_sees_images_as_large_as_pretrained_weights_would(pictures):
    flags = ("--device", "cpu", "--dataname", "folder", "--datapath", str(pictures), "--arch", "test_vit")
    plain = doctor.settings(flags)
    pretrained = doctor.settings([*flags, "--pretrained"])
    assert plain.data.image_size is None and pretrained.data.image_size == 160 and not pretrained.model.pretrained
    assert doctor.settings([*flags, "--pretrained", "--image-size", "64"]).data.image_size == 64
