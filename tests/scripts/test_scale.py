"""The calculator: what limits, worked out by hand; its flags and sources; what it measures."""

import dataclasses
import re
from pathlib import Path

import pytest

from scripts import scale
from scripts.common.command_line import run_tool
from scripts.scaling import measure
from scripts.scaling.estimate import Images, Machines, Workload, estimate, exchange_seconds

# 8 GPUs of 1,000 images/s a machine; 4 cores decode for each; 10 Gbit/s between machines.
MACHINES = Machines(
    gpus=8,
    cores_per_gpu=5,
    training_cores=1,
    disk_mb_s=1600,
    network_gbit=10,
    latency_us=0,
    overlap=0.5,
    dollars_per_gpu_hour=2,
)
IMAGES = Images(count=100_000, kb=100, rate=300)
WORK = Workload(rate=1000, million_weights=25, gradient_bytes=4, batch_size=250, largest_batch=10**6)


def test_gradients_cross_the_network_as_often_as_an_optimal_all_reduce_must_send_them():
    assert exchange_seconds(MACHINES, WORK, 8) == 0
    assert exchange_seconds(MACHINES, WORK, 16) == pytest.approx(100e6 * 8 / 10e9)  # two machines: all of them once
    assert exchange_seconds(MACHINES, WORK, 32) == pytest.approx(1.5 * 100e6 * 8 / 10e9)
    slow = dataclasses.replace(MACHINES, latency_us=50)
    assert exchange_seconds(slow, WORK, 32) - exchange_seconds(MACHINES, WORK, 32) == pytest.approx(4 * 50e-6)


@pytest.mark.parametrize(
    ("machines", "images", "work", "gpus", "limit", "rate"),
    [
        ({}, {}, {}, 1, "step", 1000),
        ({"cores_per_gpu": 3}, {}, {}, 1, "decode", 600),
        ({"cores_per_gpu": 1}, {}, {}, 1, "decode", 0),
        ({"disk_mb_s": 1600}, {"kb": 400}, {}, 8, "disk", 500),
        ({"disk_mb_s": 1600}, {"kb": 400}, {}, 2, "step", 1000),  # of one machine that only two use
        ({}, {}, {}, 32, "step", 1000),  # 0.12 s travel beside half of 0.25 s
        ({}, {}, {"batch_size": 100}, 32, "network", 100 / (0.1 + 0.12 - 0.05)),
        ({}, {}, {"largest_batch": 3200}, 32, "network", 100 / (0.1 + 0.12 - 0.05)),
        ({}, {}, {"batch_size": 100, "gradient_bytes": 2}, 32, "network", 100 / (0.1 + 0.06 - 0.05)),
    ],
)
def test_the_slowest_part_limits(machines, images, work, gpus, limit, rate):
    changed = [
        dataclasses.replace(part, **changes) for part, changes in ((MACHINES, machines), (IMAGES, images), (WORK, work))
    ]
    found = estimate(*changed, gpus)
    assert (found.limit, found.rate) == (limit, pytest.approx(rate))


def test_time_and_price_of_an_epoch_and_the_cores_that_would_keep_up():
    found = estimate(dataclasses.replace(MACHINES, cores_per_gpu=2), IMAGES, WORK, 4)
    assert (found.limit, found.rate, found.epoch_seconds) == ("decode", 300, pytest.approx(100_000 / 1200))
    assert found.dollars == pytest.approx(4 * 2 * 100_000 / 1200 / 3600)
    assert found.cores == 5  # 1,000 images/s are 3.33 cores, and one trains


def test_every_input_is_printed_with_its_source_and_a_flag_takes_its_place(capsys):
    assert scale.main(["--gpus", "8", "--decode-rate", "321", "--training-cores", "0", "--cores-per-gpu", "2"]) == 0
    out = capsys.readouterr().out
    assert all(figure.what in out for figure in scale.FIGURES.values())
    assert "321    as given" in out and scale.FIGURES["vit-rate"].source in out
    assert "ResNet-50     8      no  decode             642            8" in out


def test_a_figure_that_is_a_multiple_of_another_follows_it_unless_given(capsys):
    """ViT-S/16 took 2,145 images/s "from" ResNet-50's rate also where that was not 2,470."""
    assert scale.main(["--resnet50-rate", "3000", "--decode-rate", "100", "--gpus", "8"]) == 0
    out = capsys.readouterr().out
    assert round(3000 * 1057.92 / 1218.01) == 2606
    assert re.search(r"ViT-S/16 on a GPU +2,606  ", out) and re.search(
        r"packed images/s that a core decodes +261  ", out
    )
    assert re.search(r"ViT-S/16 +8 +yes +decode +1,305 ", out)  # of five cores
    assert scale.main(["--resnet50-rate", "3000", "--vit-rate", "50", "--gpus", "8"]) == 0
    assert re.search(r"ViT-S/16 on a GPU +50    as given", capsys.readouterr().out)


def page_rows(title):
    """The cells of the table below ``title`` on the page, without its two head lines."""
    text = (Path(scale.__file__).parents[1] / "docs/scale.md").read_text(encoding="utf-8").partition(f"## {title}\n")[2]
    lines = [line for line in text.partition("\n## ")[0].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def computed(flags):
    """{(network, GPUs, packed): (limit, images/s a GPU, cores a GPU, epoch, dollars)}."""
    own = scale.read_flags(flags)
    given = {name: getattr(own, name.replace("-", "_")) for name in scale.FIGURES}
    return {tuple(row[:3]): tuple(row[3:]) for row in scale.rows(scale.completed(given), own)}


def test_the_pages_results_are_those_of_the_script():
    found = computed([])
    network = ""
    for name, gpus, limit, rate, cores, packed_cores, epoch, dollars in page_rows("An epoch of ImageNet"):
        network = name or network
        assert found[network, gpus, "no"] == (limit, rate, cores, epoch, dollars), (network, gpus)
        assert found[network, gpus, "yes"] == (limit, rate, packed_cores, epoch, dollars), (network, gpus)
    lines = page_rows("Where that changes")
    gpus = ""
    flags = ""
    for title, given, limit, rate, epoch, dollars in lines:
        gpus = re.search(r"([\d,]+) GPUs", title).group(1) if "GPUs" in title else gpus
        flags = given.strip("`") or flags
        row = computed(["--gpus", gpus.replace(",", ""), *flags.split()])[
            "ResNet-50", gpus, "yes" if "packed" in title else "no"
        ]
        words, _, cores = limit.partition(", ")
        assert row[:2] + row[3:] == (words, rate, epoch, dollars), title
        assert not cores or cores == f"{row[2]} cores wanted", title
    assert len(lines) == 10


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--measure none.jpg", "--measure none.jpg: no such file"),
        ("--overlap 2", "--overlap 2: must be at most 1"),
        ("--dollars -1", "argument --dollars: '-1': must be at least"),
        ("--gpus 0", "argument --gpus: '0': must be at least 1"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(flags, words, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["scale.py", *flags.split()])
    assert run_tool(scale.NAME, scale.main) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"scale.py: {words}") and len(err.splitlines()) == 1


@pytest.mark.parametrize("zero", ["0", "0.00", " 0e0 ", "-0"])
def test_zero_is_zero_however_it_is_written(zero):
    assert scale.read_flags(["--overlap", zero]).overlap == 0


def test_packed_photographs_are_smaller_and_decode_faster():
    found = measure.measure(measure.photographs(), turns=5)
    assert found.kb == pytest.approx(169.82)
    assert found.packed_kb < 0.3 * found.kb and found.ratio > 1.3
