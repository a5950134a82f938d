"""docs/results.md is what the kept runs say: each figure from metrics.csv, config.yaml and the log's last line."""

import re
import shutil
import statistics
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from scripts.common.recipes import recipes
from scripts.common.runs import read_run
from scripts.lab import collect_results
from scripts.lab.results import estimates
from tests.helpers import answer, csv_rows
from tests.scripts.test_sweep import DEAD, EARLY, keep_run
from utils.config.settings import UserError

RUN = ["--config", "digits/fc", "--device", "cpu", "--output", "somewhere", "--resume=auto", "--no-progress"]
TOP1 = {0: 97.5, 1: 98.0, 2: 96.5}


collect = partial(answer, collect_results)
FEW = ("digits/fc", "digits/vgg11", "fashionmnist/fc", "cifar10/airbench", "imagenette/resnet10t")


def cells(page, recipe):
    (line,) = [line for line in page.read_text().splitlines() if line.startswith(f"| {recipe} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.fixture(autouse=True)
def quick(request, monkeypatch):
    """Few recipes, and estimates without their networks, but where all are compared with what is written."""
    if "kept" not in request.fixturenames:
        few = [recipe for recipe in recipes() if recipe.name in FEW]
        monkeypatch.setattr(collect_results, "recipes", lambda: few)
        monkeypatch.setattr(collect_results.estimates, "training_multiply_adds", lambda recipe: 10**15)
        monkeypatch.setattr(collect_results.estimates, "training_bytes", lambda recipe, gpus: 10**9)


@pytest.fixture(scope="module")
def kept():
    """The rows of the page that the kept runs give, and the recipes without one."""
    found = collect_results.finished_runs([str(collect_results.KEPT)])
    return collect_results.result_rows(found, collect_results.read_machines())


@pytest.fixture
def runs(tmp_path):
    """Three seeds of digits/fc, a repetition of one, and runs that are none of the recipe's."""
    for seed, top1 in TOP1.items():
        keep_run(tmp_path / "runs" / f"b{seed}", [*RUN, "--seed", str(seed)], [*[98.5] * 19, top1])
    keep_run(tmp_path / "runs" / "a0", [*RUN, "--seed", "0"], [50.0] * 20)  # before b0
    keep_run(tmp_path / "runs" / "other", [*RUN, "--lr", "0.2"], [10.0] * 20)
    keep_run(tmp_path / "runs" / "cut", [*RUN, "--seed", "9"], [10.0] * 5)
    return tmp_path / "runs"


def rows_of(runs):
    """The rows of the seeds that count, and the recipes without one."""
    found = [read_run(runs / f"b{seed}") for seed in TOP1]
    return collect_results.result_rows(found, collect_results.read_machines())


def test_a_row_is_the_mean_and_the_spread_of_the_seeds(runs, tmp_path, capsys, monkeypatch):
    page = tmp_path / "results.md"
    code, said = collect([runs, "--output", page], capsys, monkeypatch)
    assert code == 0 and said.out == f"5 finished runs, 3 of them of 1 recipe: {page}\n"
    mean = statistics.fmean(TOP1.values())
    deviation = statistics.stdev(TOP1.values())
    quantile = 4.302653  # of Student's distribution with 2 degrees of freedom
    assert cells(page, "digits/fc") == [
        "digits/fc",
        "20",
        f"{mean:.2f} ± {deviation:.2f} % (3)",
        f"± {quantile * deviation / 3**0.5:.2f}",
        "none known",
        "30 s",
        "a computer",
        "default",
        "unknown",
        "half: shared machine",
    ]


def test_a_dead_run_is_counted_beside_the_mean(runs, tmp_path, capsys, monkeypatch):
    keep_run(runs / "dead", [*RUN, "--seed", "3"], [10.1] * 20, figures=DEAD)
    collect([runs, "--output", tmp_path / "results.md"], capsys, monkeypatch)
    assert cells(tmp_path / "results.md", "digits/fc")[2].endswith(" % (4, 1 doubtful)")


def test_runs_of_another_name_have_a_row_of_their_own(runs, tmp_path, capsys, monkeypatch):
    keep_run(runs / "named", [*RUN, "--name", "own-split"], [40.0] * 20)
    page = tmp_path / "results.md"
    collect([runs, "--output", page], capsys, monkeypatch)
    assert cells(page, "digits/fc")[2].endswith("(3)")
    assert cells(page, "digits/fc (own-split)")[2:4] == ["40.00 % (1)", ""]


def test_a_figure_on_a_split_of_our_own_stands_beside_no_literature(tmp_path, capsys, monkeypatch):
    flags = ["--config", "fashionmnist/fc", "--datapath", "D", "--name"]
    for name in ("own-split", "theirs"):
        keep_run(tmp_path / "runs" / name, [*flags, name], [90.0] * 40)
    page = tmp_path / "results.md"
    collect([tmp_path / "runs", "--output", page], capsys, monkeypatch)
    assert cells(page, "fashionmnist/fc (theirs)")[4] == "[88.33 %](../configs/fashionmnist/fc.yaml)"
    assert cells(page, "fashionmnist/fc (own-split)")[4] == ""


def test_runs_that_measured_another_value_for_themselves_share_no_mean(tmp_path, capsys, monkeypatch):
    for seed, amp in (("0", "bf16"), ("1", "bf16"), ("2", "off")):
        flags = ["--config", "cifar10/airbench", "--datapath", "D", "--amp", amp]
        keep_run(tmp_path / "runs" / seed, [*flags, "--seed", seed], [*[80.0] * 7, 94.0 if amp == "bf16" else 90.0])
    page = tmp_path / "results.md"
    collect([tmp_path / "runs", "--output", page], capsys, monkeypatch)
    rows = [line.split(" | ") for line in page.read_text().splitlines() if line.startswith("| cifar10/airbench |")]
    assert [(row[7], row[2]) for row in rows] == [("bf16", "94.00 ± 0.00 % (2)"), ("float32", "90.00 % (1)")]


def test_runs_on_other_images_of_the_users_own_share_no_mean(tmp_path, capsys, monkeypatch):
    for seed, place in (("0", "flowers"), ("1", "birds")):
        flags = ["--config", "imagenette/resnet10t", "--datapath", place, "--seed", seed]
        keep_run(tmp_path / "runs" / seed, flags, [90.0] * 40)
    page = tmp_path / "results.md"
    collect([tmp_path / "runs", "--output", page], capsys, monkeypatch)
    for place in ("flowers", "birds"):
        assert cells(page, f"imagenette/resnet10t ({place})")[2] == "90.00 % (1)"


@pytest.mark.parametrize(
    "flags, machine, told",
    [
        ([], "1 process(es) on cpu, 2 thread(s) each (EPYC)", "float32"),
        ([], "1 process(es) on cuda (H100)", "fp16"),
        (["--amp", "bf16"], "1 process(es) on cpu, 2 thread(s) each (EPYC)", "bf16"),
        (["--amp", "off"], "1 process(es) on cuda (H100)", "float32"),
    ],
)
def test_a_row_names_the_format_that_its_runs_computed_in(flags, machine, told, tmp_path):
    run = keep_run(tmp_path / "run", ["--config", "digits/fc", *flags], [98.0] * 20)
    path = run / "config.yaml"
    path.write_text(path.read_text().replace("machine: a computer", f"machine: {machine}"))
    assert collect_results.number_format(read_run(run)) == told


def test_runs_with_as_many_threads_share_a_row_however_many_cores_there_were(tmp_path, capsys, monkeypatch):
    for cores in (1, 2):
        path = keep_run(tmp_path / "runs" / str(cores), [*RUN, "--seed", str(cores)], [98.0] * 20) / "config.yaml"
        machine = f"machine: 1 process(es) on cpu, 1 thread(s) each (EPYC, {cores} core(s))"
        path.write_text(path.read_text().replace("machine: a computer", machine))
    page = tmp_path / "results.md"
    collect([tmp_path / "runs", "--output", page], capsys, monkeypatch)
    assert cells(page, "digits/fc")[2].endswith("(2)")


def test_seeds_on_several_machines_share_a_mean_and_each_machine_has_its_time(tmp_path, capsys, monkeypatch):
    """Also the same seed counts on each: its figures differ. On one machine, the later repetition counts."""
    known = {"X": {"log": "EPYC", "what": "X"}, "Y": {"log": "Xeon", "what": "Y"}}
    monkeypatch.setattr(collect_results, "read_machines", lambda: collect_results.Machines(known, set(), {}))
    places = (("1", "EPYC", 96.0), ("0", "Xeon", 97.0), ("1", "Xeon", 98.0))
    for number, (seed, processor, top1) in enumerate((("1", "EPYC", 10.0), *places)):
        run = keep_run(tmp_path / "runs" / f"2026-01-01_00-0{number}-00_a", [*RUN, "--seed", seed], [top1] * 20)
        text = (run / "config.yaml").read_text()
        machine = f"machine: 1 process(es) on cpu, 1 thread(s) each ({processor})"
        (run / "config.yaml").write_text(text.replace("machine: a computer", machine))
    page = tmp_path / "results.md"
    collect([tmp_path / "runs", "--output", page], capsys, monkeypatch)
    found = cells(page, "digits/fc")
    assert found[2:4] == ["97.00 ± 1.00 % (3)", "± 2.48"]
    assert found[5:8] == ["30 s on Y, 1 thread; 30 s on X, 1 thread", "Y, 1 thread; X, 1 thread", "float32"]


@pytest.mark.parametrize("second, time", [("00-01-20", "30 s"), ("00-00-20", "30 s, several at once")])
def test_runs_that_overlap_say_so_beside_their_time(second, time, tmp_path, capsys, monkeypatch):
    for seed, start in enumerate(("00-00-00", second)):  # each takes 30 s
        keep_run(tmp_path / "runs" / f"2026-01-01_{start}_a", [*RUN, "--seed", str(seed)], [98.0] * 20)
    page = tmp_path / "results.md"
    collect([tmp_path / "runs", "--output", page], capsys, monkeypatch)
    assert cells(page, "digits/fc")[5] == time


def test_every_recipe_of_a_data_set_has_a_row_or_is_listed_as_not_measured(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(collect_results, "recipes", recipes)
    page = tmp_path / "results.md"
    collect([runs, "--output", page], capsys, monkeypatch)
    listed = page.read_text().partition("## Not measured here")[2]
    for recipe in recipes():
        data, _, name = recipe.name.partition("/")
        if name and recipe.name != "digits/fc":
            (line,) = [line for line in listed.splitlines() if line.startswith(f"| {recipe.name} | ")]
            assert line.split(" | ")[1] == collect_results.literature(recipe)


def test_a_row_is_full_evidence_with_three_runs_that_had_the_machine_to_themselves(runs, tmp_path, monkeypatch):
    rows, _ = rows_of(runs)
    machines = collect_results.Machines({"Z": {"log": "a computer"}}, {"digits/fc Z"}, {})
    (row,) = rows
    assert machines.evidence(row) == "full" and list(machines.tags(row)) == ["Z"]
    assert machines.evidence(row._replace(runs=row.runs[:2])) == "half: few seeds"
    assert machines._replace(alone=set()).evidence(row) == "half: shared machine"
    log = Path(shutil.copytree(row.runs[0].folder, tmp_path / "resumed")) / "log.txt"
    log.write_text(f"2026-11-30 12:00:00 commit: 0123456789, changed\n{log.read_text()}")
    resumed = read_run(log.parent)
    assert machines.evidence(row._replace(runs=[resumed, *row.runs[1:]])) == "half: changed code"
    both = row._replace(runs=[*row.runs, *(replace(run, machine="busy", seconds=99.0) for run in row.runs)])
    assert machines.evidence(both) == "full" and machines.time(both) == "30 s on Z"
    assert machines._replace(alone=set()).time(both) == "30 s on Z; 99 s on busy"
    one_alone = row._replace(runs=[row.runs[0], *(replace(run, machine="busy") for run in row.runs[1:])])
    assert machines.evidence(one_alone) == "half: shared machine"
    config = runs / "b1" / "config.yaml"
    config.write_text("# commit: de786aac69, changed\n" + config.read_text())
    (row,), _ = rows_of(runs)
    assert machines.evidence(row) == "half: changed code"
    assert machines._replace(ran={"digits/fc Z": "de786aac70"}).evidence(row) == "full"


@pytest.mark.parametrize(
    ("before", "after", "counted"),
    [
        ("2 thread(s) each (AMD EPYC, 2 core(s))", "2 thread(s) each (AMD EPYC, AVX512, 2 core(s))", 1),
        ("2 thread(s) each (AMD EPYC, 2 core(s))", "4 thread(s) each (AMD EPYC, 4 core(s))", 2),
        ("(AMD EPYC, AVX512, 2 core(s))", "(AMD EPYC, AVX2 by ATEN_CPU_CAPABILITY, 2 core(s))", 2),
    ],
)
def test_a_seed_counts_once_on_a_machine_however_its_record_names_it(runs, before, after, counted):
    run = read_run(runs / "b1")
    found = [replace(run, machine=f"1 process(es) on cpu, {machine}") for machine in (before, after)]
    (row,), _ = collect_results.result_rows(found, collect_results.read_machines())
    assert len(row.runs) == counted


def test_an_interval_that_would_pass_100_percent_is_left_out():
    assert collect_results.interval([99.7, 100.0, 99.2]) == ""
    assert collect_results.interval([96.0, 97.0, 98.0]) == "± 2.48"


def test_the_picture_has_a_dot_for_each_row(runs, tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    drawn = []
    monkeypatch.setattr(Axes, "plot", lambda self, x, y, *_, **__: drawn.append((x, y)))
    monkeypatch.setattr(Axes, "legend", lambda *_, **__: None)
    rows, _ = rows_of(runs)
    collect_results.draw(rows, collect_results.Machines({}, set(), {}), tmp_path / "picture.png")
    assert drawn == [(30, pytest.approx(100 - statistics.fmean(TOP1.values()))), ([], [])]
    assert (tmp_path / "picture.png").stat().st_size > 1000


ESTIMATES = re.compile(r"^(\|[^|\n]*\|[^|\n]*\| [\d,]+ \|).*", re.MULTILINE)  # what follows a global batch


def test_page_readme_and_headers_show_what_the_kept_runs_give(kept, monkeypatch):
    """All but the estimates, for which each recipe's network is built: see below."""
    monkeypatch.setattr(estimates, "_cost", lambda *_: estimates.Cost(10**9, 10**6, 10**6))
    page = collect_results.PAGE.read_text()
    readme = collect_results.README.read_text()
    rows, unmeasured = kept
    machines = collect_results.read_machines()
    made = collect_results.page(rows, unmeasured, machines)
    assert ESTIMATES.sub(r"\1", page) == ESTIMATES.sub(r"\1", made), (
        "python scripts/lab/collect_results.py makes it anew"
    )
    said = readme.partition(collect_results.BEGIN)[2].partition(collect_results.END)[0]
    assert said == collect_results.readme_rows(rows, machines), "python scripts/lab/collect_results.py makes it anew"
    for recipe in recipes():
        told = re.findall(
            r"(\d[\d.]* %)(?: top-1)?(?: \((?:mean of )?(one|two|three|five|six|ten|13|25) seeds?[^)]*\))?(?: in (\d+ (?:s|min)))?",
            recipe.measured,
        )
        count = "5"
        for figure, seeds, time in told:
            if figure in recipe.measured.partition("best epoch ")[2]:
                continue
            count = {"one": "1", "two": "2", "three": "3", "five": "5", "six": "6", "ten": "10", "": count}.get(
                seeds, seeds
            )
            assert re.search(
                rf"^\| {recipe.name} .*\| {figure[:-2]}( ± \S+)? % \({count}\) .*{time}", page, flags=re.MULTILINE
            ), (recipe.name, figure)


@pytest.mark.thorough
def test_the_estimates_are_those_of_the_page_and_the_measured_recipes_need_less_memory_than_it_says(kept):
    rows, unmeasured = kept
    made = collect_results.page(rows, unmeasured, collect_results.read_machines())
    assert collect_results.PAGE.read_text() == made, "python scripts/lab/collect_results.py makes it anew"
    rest = [recipe.name for recipe in recipes() if "/" in recipe.name and recipe not in unmeasured]
    assert len(rest) > 20 and max(estimates.training_bytes(name, 1) for name in rest) < 2e9


def test_the_rates_are_those_of_the_runs_that_they_name(kept):
    (row,) = (row for row in kept[0] if row.recipe.name == "imagenette/resnet10t")
    machines = collect_results.read_machines()
    (run,) = (run for run in row.runs if machines.letter(run) == "A")
    speeds = [float(epoch["images_per_second"]) for epoch in csv_rows(run.folder / "metrics.csv")]  # of training alone
    seconds = sum(estimates.TRAINING_IMAGES["imagenette"] / speed for speed in speeds)
    measured = estimates.training_multiply_adds("imagenette/resnet10t") / seconds
    assert float(machines.known["A"]["multiply_adds_per_second"]) == pytest.approx(measured, rel=0.01)
    assert "3,697 images/s" in (collect_results.ROOT / "docs/benchmarks/h100.md").read_text(encoding="utf-8")
    resnet50 = estimates.training_multiply_adds("imagenet/resnet50") / (1_281_167 * 90)
    assert float(machines.known["D"]["multiply_adds_per_second"]) == pytest.approx(3697 * resnet50, rel=0.01)


def test_a_row_of_the_readme_without_kept_runs_is_one_line():
    recipe, form = collect_results.IN_README[0]
    with pytest.raises(UserError, match=f"README.md: 0 rows of {recipe} in {form} are kept"):
        collect_results.readme_rows([], collect_results.read_machines())


def test_kept_runs_give_the_same_table_and_name_no_place(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(collect_results, "KEPT", tmp_path / "kept")
    first = tmp_path / "first.md"
    second = tmp_path / "second.md"
    moved = keep_run(runs / "moved", [*RUN, "--seed", "1", "--output", "/elsewhere/all"], [98.0] * 20)
    log = "2026-11-22 08:00:00 machine: another\n" + (moved / "log.txt").read_text()  # where it went on
    (moved / "log.txt").write_text(log.replace("run=x", "run=/elsewhere/all/moved"))
    collect([runs, "--keep", "--output", first], capsys, monkeypatch)
    collect([tmp_path / "kept", "--output", second], capsys, monkeypatch)
    assert first.read_text() == second.read_text()
    assert "| a computer; a computer; then another |" in first.read_text()
    kept = [path for path in (tmp_path / "kept").rglob("*") if path.is_file()]
    assert len(kept) == 4 * 3
    texts = [path.read_text() for path in kept]
    assert not [text for text in texts if str(tmp_path) in text or "/elsewhere" in text]
    assert any("run=RUNS/moved" in text for text in texts)


def test_what_is_kept_later_stands_beside_what_was_kept_before(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(collect_results, "KEPT", tmp_path / "kept")
    page = tmp_path / "results.md"
    for recipe, epochs in (("digits/fc", 20), ("digits/vgg11", 20)):
        folder = tmp_path / recipe.replace("/", "_")
        keep_run(folder / "run", ["--config", recipe, "--device", "cpu"], [98.0] * epochs)
        collect([folder, "--keep", "--output", page], capsys, monkeypatch)
    assert [cells(page, recipe)[2] for recipe in ("digits/fc", "digits/vgg11")] == ["98.00 % (1)"] * 2


def test_a_run_whose_table_is_cut_off_is_one_line(runs, tmp_path, capsys, monkeypatch):
    path = runs / "b0" / "metrics.csv"
    path.write_bytes(path.read_bytes()[:-3])
    code, said = collect([runs, "--output", tmp_path / "results.md"], capsys, monkeypatch)
    assert code == 2 and "b0: " in said.err and "cannot be read (a row of metrics.csv is cut off)" in said.err


def test_a_kept_run_that_stopped_early_is_still_finished(tmp_path, monkeypatch):
    monkeypatch.setattr(collect_results, "KEPT", tmp_path / "kept")
    run = keep_run(tmp_path / "run", [*RUN, "--early-stopping", "2"], [98.0] * 5, log=EARLY)
    collect_results.keep("digits/fc", read_run(run))
    assert read_run(tmp_path / "kept/digits/fc/run").epochs == 5


@pytest.mark.parametrize("level", [85, 90, 92])
def test_the_times_to_so_many_percent_of_imagenette_are_those_of_the_kept_runs(level):
    said = []
    for path in sorted(collect_results.KEPT.glob("imagenette/*/*/metrics.csv")):
        rows = csv_rows(path)
        reached = [number for number, row in enumerate(rows) if float(row["val_top1"] or 0) >= level]
        if reached:
            minutes = sum(float(row["seconds"]) for row in rows[: reached[0] + 1]) / 60
            said.append(f"epoch {rows[reached[0]]['epoch']}, {minutes:.0f} min")
        else:
            said.append(f"not reached: {float(rows[-1]['val_top1']):.2f} % after epoch {rows[-1]['epoch']}")
    assert f"| {level} % | {' | '.join(said)} |" in (collect_results.ROOT / "docs/benchmarks/cpu.md").read_text()
