"""scripts/lab/benchmark_amp.py: what it prints and leaves, its arithmetic by hand, its step against a plain loop."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from models import build_model
from scripts.lab import benchmark_amp
from scripts.lab.benchmarks import steps
from scripts.lab.benchmarks.steps import AMP, Round, Training, mlp, tf32
from tests.helpers import csv_rows
from tests.utils.loop.test_step_graph import Tape
from utils.config.groups.model import ModelSettings
from utils.config.groups.precision import PrecisionSettings
from utils.config.groups.run import RunSettings
from utils.runtime.distributed import Distributed, RankInfo

CPU = torch.device("cpu")


def table_rows(text):
    """The printed table as one dict a row; columns are two spaces apart."""
    lines = text.splitlines()
    rule = next(number for number, line in enumerate(lines) if line.startswith("---"))
    places = []
    begin = 0
    for dashes in lines[rule].split("  "):
        places.append(slice(begin, begin + len(dashes)))
        begin += len(dashes) + 2
    headers = [lines[rule - 1][place].strip() for place in places]
    body = []
    for line in lines[rule + 1 :]:
        if line.startswith("Medians"):
            break
        body.append(dict(zip(headers, (line[place].strip() for place in places), strict=True)))
    return body


# ------------------------------------------------------------------------------------ the whole tool


def test_the_table_has_a_row_for_each_format_the_device_knows_and_names_the_others(tmp_path, capsys):
    flags = "--width 32 --layers 2 --batch-size 8 --steps 2 --rounds 3 --device cpu --output"
    assert benchmark_amp.main([*flags.split(), str(tmp_path / "new" / "folder")]) == 0
    out = capsys.readouterr().out
    rows = table_rows(out)
    assert [row["format"] for row in rows] == ["fp32", "fp16 + scaler", "bf16"]
    assert list(rows[0]) == ["format", "ms a step", "min - max", "images/s", "speed-up"], "memory is a GPU's"
    assert "tf32 is left out: needs a GPU." in out
    assert "MLP of 2 linear layers 32-32, batch 8, 3 rounds of 2 steps" in out.splitlines()[0]
    assert f"torch {torch.__version__}" in out.splitlines()[0]
    assert [row["format"] for row in csv_rows(tmp_path / "new/folder/amp.csv")] == ["fp32", "fp16", "bf16"]


# --------------------------------------------------------------------------------------- arithmetic


@pytest.fixture
def on_gpu(monkeypatch, tmp_path):
    """A function that measures made-up rounds of fp32 and fp16 as on a GPU, without graphs, and returns the CSV rows."""

    def measure(rounds, failures=()):
        monkeypatch.setattr(benchmark_amp, "in_rounds", lambda *_: (rounds, dict(failures)))
        monkeypatch.setattr("scripts.common.timing.unsupported", lambda name, _: "" if name in rounds else "no")
        monkeypatch.setattr("scripts.common.timing.device_name", lambda _: "a GPU")
        monkeypatch.setattr(steps, "GRAPH", "")
        flags = ["--batch-size", "16", "--output", str(tmp_path)]
        assert benchmark_amp.benchmark(benchmark_amp.read_flags(flags), torch.device("cuda")) == 0
        return csv_rows(tmp_path / "amp.csv")[: len(rounds)]

    return measure


def test_figures_are_those_computed_by_hand(on_gpu, capsys):
    fp32 = [Round(0.010, 1000), Round(0.040, 900), Round(0.012, 900)]
    fp16 = [Round(0.005, 1400), Round(0.010, 1500), Round(0.008, 1400)]
    first, found = on_gpu({"fp32": fp32, "fp16": fp16})
    assert [float(found[name]) for name in ("ms_per_step", "ms_min", "ms_max")] == pytest.approx([8, 5, 10])
    assert float(found["images_per_second"]) == pytest.approx(2000)
    # the median of 2, 4 and 1.5; of the medians it would be 1.5
    assert float(found["speed_up"]) == pytest.approx(2.0)
    assert (int(found["peak_bytes"]), float(found["memory_ratio"])) == (1500, 1.5)
    assert (float(first["speed_up"]), float(first["memory_ratio"])) == (1, 1)
    of_fp32, row, *_ = table_rows(capsys.readouterr().out)
    assert of_fp32["speed-up"] == "1.00x"
    assert (row["ms a step"], row["min - max"], row["images/s"]) == ("8.00", "5.00 - 10.00", "2,000")
    assert (row["speed-up"], row["peak MB"], row["memory"]) == ("2.00x", "0.0", "1.50x")


def test_what_is_not_known_is_left_open(on_gpu, capsys):
    rounds = {"fp32": [Round(0.01, 5)], "fp16": [Round(0.01, 5)]}
    lost, found = on_gpu(rounds, {"fp32": "out of memory"})
    assert {value for name, value in lost.items() if name in found and value and name != "format"} >= {"out of memory"}
    assert lost["ms_per_step"] == lost["speed_up"] == lost["peak_bytes"] == ""
    assert (float(found["ms_per_step"]), found["speed_up"], found["memory_ratio"]) == (10, "", "")
    assert table_rows(capsys.readouterr().out)[0]["ms a step"] == "out of memory"


# ------------------------------------------------------------------------------------- measurements


def test_rounds_are_interleaved_and_a_row_out_of_memory_is_said_and_left_out(monkeypatch, tmp_path, capsys):
    calls = []

    def time_round(form, *_):
        calls.append(form)
        if calls == ["fp32", "fp16", "bf16", "bf16", "fp16"]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return Round(len(calls))

    monkeypatch.setattr(steps, "time_round", time_round)
    flags = ["--rounds", "3", "--device", "cpu", "--output", str(tmp_path)]
    assert benchmark_amp.main(flags) == 0
    assert calls == ["fp32", "fp16", "bf16", "bf16", "fp16", "fp32", "fp32", "bf16"]
    rows = csv_rows(tmp_path / "amp.csv")
    assert [row["failure"] for row in rows] == ["", "out of memory", ""]
    assert [float(rows[0][name]) for name in ("ms_min", "ms_per_step", "ms_max")] == [1000, 6000, 7000]
    monkeypatch.setattr(steps, "time_round", lambda *_: torch.ones(2) @ torch.ones(3))
    with pytest.raises(RuntimeError, match="size"):  # is not taken for a lack of memory
        benchmark_amp.main(flags)


def test_tf32_is_as_before_afterwards_also_after_an_error():
    def state():
        return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32

    before = state()
    for allowed in (True, False):
        with pytest.raises(KeyError), tf32(allowed):
            assert state() == (allowed, allowed)
            raise KeyError
        assert state() == before


# ------------------------------------------------------------------------------------------ the step


def network():
    torch.manual_seed(0)
    batch = torch.randn(4, 3, 8, 8), torch.randint(10, (4,))
    return build_model(ModelSettings(arch="conv2"), classes=10, channels=3, image_size=8), [batch]


WORKLOADS = {"mlp": lambda: mlp(16, 3, 4, 2, CPU), "network": network}


def vector(network):
    return torch.cat([parameter.detach().flatten() for parameter in network.parameters()])


def plain_loop(network, batches, loss, momentum):
    """The loop that every tutorial has: float32, no autocast, no scaler."""
    optimizer = torch.optim.SGD(network.parameters(), lr=0.001, momentum=momentum)
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss(network(inputs), targets).backward()
        optimizer.step()
    return vector(network)


@pytest.mark.parametrize(
    ("kind", "loss", "momentum"),
    [
        ("mlp", nn.functional.mse_loss, 0.0),
        ("network", nn.functional.cross_entropy, 0.9),
    ],
)
def test_the_steps_of_every_format_are_those_of_a_plain_loop(kind, loss, momentum):
    trainings = {
        name: Training(*WORKLOADS[kind](), PrecisionSettings(amp=AMP[name]), momentum)
        for name in ("fp32", "fp16", "bf16")
    }
    start = vector(trainings["fp32"].network)
    plain = copy.deepcopy(trainings["fp32"].network)
    batches = trainings["fp32"].batches
    exact = plain_loop(plain, [batches[n % len(batches)] for n in range(3)], loss, momentum)
    for name, training in trainings.items():
        training.run(3)
        off = ((vector(training.network) - exact).norm() / (exact - start).norm()).item()
        assert off == 0 if name == "fp32" else 0 < off < 0.1, name
        assert training.scaler.is_enabled() == (name == "fp16")
        assert all(parameter.grad is None for parameter in training.network.parameters())


# --------------------------------------------------------------------------------------- accounting


ACCOUNTING = "--accounting --amp off --steps 3 --arch conv2 --image-size 8 --batch-size 4 --device cpu".split()


@pytest.fixture
def travals(monkeypatch):
    """The ``TraVal`` of each side that has one, in order."""
    made = []
    own = benchmark_amp.repeated
    monkeypatch.setattr(benchmark_amp, "repeated", lambda traval, batch: made.append(traval) or own(traval, batch))
    return made


def sides(*flags):
    settings = benchmark_amp.accounting_settings(benchmark_amp.read_flags([*ACCOUNTING, *flags]), CPU)
    return benchmark_amp.loops(settings, Distributed(RankInfo(), RunSettings(device="cpu")))


def test_accounting_compares_two_loops_that_train_alike(travals, monkeypatch):
    bare = []
    monkeypatch.setattr(steps, "Training", lambda *given, **more: bare.append(Training(*given, **more)) or bare[-1])
    runs = sides()
    start = vector(bare[0].network)
    for run in runs.values():
        run(3)
    assert torch.equal(vector(bare[0].network), vector(travals[0].network))
    assert not torch.equal(vector(bare[0].network), start)


def test_accounting_prints_each_side_and_leaves_every_round(tmp_path, capsys):
    flags = "--accounting --arch conv2 --image-size 8 --batch-size 4 --steps 2 --rounds 3 --amp fp16 --ema-decay 0.9"
    assert benchmark_amp.main([*flags.split(), "--device", "cpu", "--output", str(tmp_path)]) == 0
    rows = table_rows(capsys.readouterr().out)
    names = ["bare loop", "TraVal.training_step", "with a moving average"]
    assert [row["step"] for row in rows] == names
    stored = csv_rows(tmp_path / "accounting.csv")
    ms = {name: [float(row["ms"]) for row in stored if row["step"] == name] for name in names}
    for row in rows:
        ratios = np.divide(ms[row["step"]], ms["bare loop"])
        assert [float(one["ratio"]) for one in stored if one["step"] == row["step"]] == pytest.approx(ratios.tolist())
        assert row["ms a step"] == f"{np.median(ms[row['step']]):,.2f}"
        if row["step"] != "bare loop":
            assert row["beyond the bare loop"].startswith(f"{100 * (np.median(ratios) - 1):+.2f} % (")


def test_only_the_side_with_an_average_keeps_one(travals):
    runs = sides("--ema-decay", "0.9")
    without, average = (traval.ema for traval in travals)
    before = vector(average.module)
    for run in runs.values():
        run(3)
    assert without is None and not torch.equal(vector(average.module), before)


@pytest.mark.parametrize("amp", ["off", "fp16", "bf16"])
def test_a_whole_step_as_a_graph_gives_the_bits_of_the_step_as_it_is(amp, monkeypatch):
    """The graph is a tape here, which refuses what the host reads."""
    monkeypatch.setattr(steps, "CudaGraph", Tape)
    plain, graph = (
        kind(*mlp(8, 2, 4, 3, CPU), PrecisionSettings(amp=amp), fused=True)
        for kind in (Training, steps.RecordedTraining)
    )
    for training in (plain, graph):
        training.run(9)
    assert all(map(torch.equal, plain.network.parameters(), graph.network.parameters()))
    assert not torch.equal(plain.network[0].weight, mlp(8, 2, 4, 3, CPU)[0][0].weight)
