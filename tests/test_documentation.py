"""What the pages say exists, and agrees: links, paths, names, the flags of every command, figures on several pages."""

import ast
import importlib
import re
import shlex
from pathlib import Path

import pytest

from models.prepare import known_preprocessing
from models.small import OWN
from scripts.lab import write_pages
from tests.end_to_end.processes import FINAL_LINE
from tests.test_structure import FILES, LAYERS, ROOT
from utils.config import arguments
from utils.config.datasets import SPECS
from utils.config.groups.augmentation import AUGMENTATIONS
from utils.config.groups.loss import LOSSES
from utils.config.groups.optimisation import LR_POLICIES
from utils.config.other_programs import other_programs
from utils.config.settings import GONE, UserError, all_settings, flag_of
from utils.data.preprocessing import resolve
from utils.optim import optimizers
from utils.record.epoch_scalars import metrics

PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in sorted(ROOT.glob("*.md")) + sorted(ROOT.glob("docs/**/*.md"))
}


def header(path):
    """The docstring or the comments of a file."""
    text = path.read_text()
    if path.suffix == ".py":
        return ast.get_docstring(ast.parse(text)) or ""
    return "\n".join(line[1:].strip() for line in text.splitlines() if line.startswith("#"))


HEADERS = {
    str(path.relative_to(ROOT)): header(path)
    for path in sorted((*ROOT.glob("scripts/*.*"), *ROOT.glob("scripts/lab/*.*"), *ROOT.glob("configs/*/*.yaml")))
}
ARCHITECTURE = "docs/architecture.md"
COMMAND = re.compile(r"(?:[A-Z_]+=\S+ +)*(?:python|bash|sbatch)(?: --nodes \S+)? (?:scripts/|main\.py)")
ROOTS = ("utils/", "scripts/", "tests/", "docs/", "configs/", "models/")
REMOVED = "docs/benchmarks/removed_programs.md"
TODAY = {page: text for page, text in (HEADERS | PAGES).items() if page != REMOVED}  # its programs are of older commits
# docker's, sbatch's, launch.sh's, pip's, uv's and W&B's
OTHERS_FLAGS = {"--shm-size", "--nodes", "--list", "--index-url", "--extra", "--append"}


def blocks(text):
    return re.findall(r"^```\w*\n(.*?)^```", text, flags=re.M | re.S)


def prose(text):
    return re.sub(r"^```\w*\n.*?^```", "", text, flags=re.M | re.S)


def code_spans(text):
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose(text))]


def commands(text):
    """Every command of a page, in a block, between backticks, or on a line of a file's header."""
    lines = [line.strip() for line in text.replace("\\\n", " ").splitlines()]
    found = [line for line in (*lines, *code_spans(text)) if COMMAND.match(line)]
    return dict.fromkeys(found)


def anchors(text):
    """The names that GitHub gives a page's headings."""
    titles = re.findall(r"^#+ (.*)", prose(text), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def is_placeholder(path):
    return any(re.fullmatch(r"[A-Z][A-Z_]+(\.\w+)?", part) for part in path.split("/"))


def paths(text):
    """Every file or folder of the repository that a text names."""
    named = re.findall(rf"(?<![\w/.])(?:{'|'.join(ROOTS)})[\w./*-]*\w/?", text)
    return {path for path in named if not is_placeholder(path)}


# ------------------------------------------------------------------------------------------ links


def test_every_link_leads_somewhere():
    for page, text in PAGES.items():
        for target in re.findall(r"\]\(([^)]+)\)", prose(text)):
            if target.startswith("https://"):
                continue
            name, _, anchor = target.partition("#")
            path = (ROOT / page).parent / name if name else ROOT / page
            assert path.exists(), (page, target)
            assert not anchor or anchor in anchors(path.read_text()), (page, target)


def links(page):
    """The files that a page links to."""
    targets = {target.partition("#")[0] for target in re.findall(r"\]\(([^)]+)\)", PAGES[page])}
    inside = {target for target in targets if target and not target.startswith("https://")}
    return {str(((ROOT / page).parent / target).resolve().relative_to(ROOT)) for target in inside}


def test_every_page_is_linked_from_the_index_and_this_from_the_readme():
    assert "docs/index.md" in links("README.md")
    assert set(PAGES) - {"docs/index.md"} <= links("docs/index.md") | links("README.md") | {"README.md"}
    assert {page for page in PAGES if page.startswith("docs/")} - {"docs/index.md"} <= links("docs/index.md")


def test_the_readme_is_read_in_three_minutes():
    assert len(PAGES["README.md"].splitlines()) <= 120


def test_every_path_exists():
    for page, text in TODAY.items():
        assert {path for path in paths(text) if not list(ROOT.glob(path.rstrip("/")))} == set(), page


# --------------------------------------------------------------------------------------- commands


def check(command):
    """Fail unless the program of ``command`` exists and its own parser takes its flags."""
    words = shlex.split(command, comments=True)
    while re.match(r"[A-Z_]+=", words[0]):
        words.pop(0)
    words = words[3:] if words[:2] == ["sbatch", "--nodes"] else words[1:]
    ignored = ("...", "[flag", "of", "main.py", "...]", "--help")  # usage lines, and what every parser takes
    program = words[0]
    given = [word for word in words[1:] if word not in ignored]
    assert (ROOT / program).is_file(), program
    if program == "scripts/torchrun.py":
        check_torchrun(words[1:])
    elif program == "main.py":
        arguments.parse(given)
    elif program.endswith(".py"):
        check_tool(program, given)
    elif (ROOT / program).with_suffix(".py").is_file():  # a shell script that hands its flags to a tool
        check_tool(str(Path(program).with_suffix(".py")), given)
    elif program == "scripts/quickstart.sh":
        arguments.parse(given)
    elif "launch.sh" in (ROOT / program).read_text():  # recipe and data, or data
        arguments.parse(given[2 if program.endswith(("launch.sh", "elastic.sh", "slurm.sbatch")) else 1 :])
    else:  # numbers, pytest's own flags, or paths, which another test looks for
        assert not [word for word in given if word.startswith("--")], command


def check_torchrun(words):
    from torch.distributed.run import get_args_parser

    if not words:  # a table names the program alone
        return
    taken = get_args_parser().parse_args([word for word in words if not word.startswith("[")])
    if taken.training_script == "main.py":
        arguments.parse(taken.training_script_args, int(taken.nproc_per_node))


def check_tool(program, given):
    source = (ROOT / program).read_text()
    if "def build_parser" in source:
        parser = importlib.import_module(program.removesuffix(".py").replace("/", ".")).build_parser()
        takes_training_flags = parser.training_flags
        _, given = parser.parse_known_args(given)
    else:  # it has no flags of its own
        takes_training_flags = "ToolParser" in source
    if takes_training_flags:
        arguments.parse(given)
    else:
        assert not [word for word in given if word.startswith("-")], given


@pytest.mark.parametrize("page", [page for page, text in TODAY.items() if commands(text)])
def test_every_command_uses_flags_that_exist(page):
    for command in commands(TODAY[page]):
        check(command)


@pytest.mark.parametrize(
    "command",
    [
        "python main.py --epoch 3",
        "python main.py --config cifar10/resnet19",
        "python scripts/torchrun.py --processes 2 main.py",
        "python scripts/torchrun.py --nproc-per-node 2 main.py --epoch 3",
        "python scripts/doctor.py --no-such-flag",
        "python scripts/lab/benchmark_amp.py --dataname digits",
        "python scripts/missing.py",
        "A=1 bash scripts/elastic.sh mnist/fc DATA --epoch 3",
        "bash scripts/lab/soak.sh --minutes 60",
        "bash scripts/lab/gpu_results.sh --piece amp",
    ],
)
def test_a_command_that_would_fail_is_noticed(command):
    assert list(commands(f"```bash\n{command}  # why\n```")) == [f"{command}  # why"]
    with pytest.raises((AssertionError, ValueError, SystemExit)):
        check(command)


def test_every_flag_that_a_page_mentions_exists():
    from torch.distributed.run import get_args_parser

    parsers = [arguments.build_parser(), get_args_parser()]
    for name, path in FILES.items():
        if name.startswith("scripts.") and "def build_parser" in path.read_text():
            parsers.append(importlib.import_module(name).build_parser())
    known = {flag for parser in parsers for action in parser._actions for flag in action.option_strings}
    of_tools = {"--float64", "--straight-from", "--fail-below-target", "--no-memory"}
    gone = {*map(flag_of, GONE)} | of_tools
    unknown = {}
    for page, text in PAGES.items():
        if page.startswith("docs/coming_from_"):  # half of their flags are of other programs
            continue
        mentioned = {flag for span in code_spans(text) for flag in re.findall(r"(?<!\S)--[a-z][\w-]*", span)}
        unknown[page] = (mentioned - known - OTHERS_FLAGS) ^ (gone if page == "CHANGELOG.md" else set())
    assert {page: flags for page, flags in unknown.items() if flags} == {}


@pytest.mark.parametrize("page", [page for page in PAGES if "val_top1=" in PAGES[page]])
def test_the_sample_of_the_last_line_is_such_a_line(page):
    samples = [line for block in blocks(PAGES[page]) for line in block.splitlines() if line.startswith("val_top1=")]
    assert samples and all(FINAL_LINE.fullmatch(line) for line in samples)


def test_every_message_that_troubleshooting_quotes_is_one_of_ours():
    symptoms = re.findall(r"^\| (.*?) \|", PAGES["docs/troubleshooting.md"], flags=re.M)
    quoted = {span for symptom in symptoms for span in code_spans(symptom)}
    others = {
        "operator torchvision::nms does not exist",
        "ensurepip is not available",
        "No space left on device",
        "Killed",
    }
    code = "\n".join(path.read_text() for path in FILES.values())
    assert quoted > others
    assert {message for message in quoted - others if message not in code} == set()


# ------------------------------------------------------------------------------------ written pages


@pytest.mark.parametrize("page", write_pages.pages(), ids=lambda path: path.stem)
def test_a_written_page_is_what_its_table_gives(page):
    assert page.read_text() == write_pages.pages()[page], "python scripts/lab/write_pages.py writes it anew"


@pytest.mark.parametrize("name", ["timm", "torchvision"])
def test_the_page_for_users_of_another_program_has_each_of_its_flags(name):
    program = other_programs().programs[name]
    wanted = program.synonyms | program.instead.keys() | program.same
    shown = {span.lstrip("-").lower() for span in code_spans(PAGES[f"docs/coming_from_{name}.md"])}
    assert wanted - shown == set()


@pytest.mark.parametrize("name", ["timm", "torchvision"])
def test_a_value_on_the_page_for_users_of_another_program_has_the_answer_of_main_py(name):
    rows = re.findall(r"^\| `(--[^`\s]+) ([^`\s]+)` \| `?(.*?)`? \|$", PAGES[f"docs/coming_from_{name}.md"], flags=re.M)
    assert len(rows) > 4
    for flag, value, answer in rows:
        with pytest.raises(UserError) as refused:
            arguments.parse([flag, value])
        assert any(answer in line for line in refused.value.mistakes), (flag, value, answer)


@pytest.mark.parametrize("name", ["timm", "torchvision"])
def test_the_example_for_users_of_another_program_asks_for_all_that_it_does_unasked(name):
    (example,) = [block for block in blocks(PAGES[f"docs/coming_from_{name}.md"]) if block.startswith("# ")]
    theirs, ours = example.split("\n", 1)
    answers = arguments.read(theirs.partition("train.py ")[2].split()).mistakes
    (unasked,) = [line for line in answers if "whose other defaults are" in line]
    asked = re.findall(r"\((--.*?)\)", unasked)
    assert len(asked) > 3 and [flags for flags in asked if flags not in " ".join(ours.split())] == []
    (command,) = commands(ours)
    settings = arguments.parse(shlex.split(command)[2:])
    if name == "timm":
        from timm import create_model
        from timm.data import resolve_data_config

        config = resolve_data_config({}, model=create_model(settings.model.arch.removeprefix("timm/")))
        assert (config["crop_pct"], config["interpolation"]) == (settings.data.crop_pct, settings.data.interpolation)


# ---------------------------------------------------------------------- figures on several pages

# Each figure that stands on several pages: where, and the words around it; brackets hold what must agree.
CPU = "docs/benchmarks/cpu.md"
H100 = "docs/benchmarks/h100.md"
RESULTS = "docs/results.md"
ROW = r"\| {} \| \d+ \| ([\d.]+)(?: ± [\d.]+)? % \({}\) .*\| {} \|"
FIGURES = {
    "cifar10/fast": {
        RESULTS: ROW.format("cifar10/fast", 13, "C, 1 thread; C"),
        "docs/benchmarks/choices.md": r"With three more, trained afterwards: ([\d.]+) %",
        "configs/cifar10/fast.yaml": r"Measured: ([\d.]+) %",
    },
    "ten seeds of cifar10/fast": {
        CPU: r"C, one core each \| float32 \| ([\d.]+) %",
        "docs/benchmarks/choices.md": r"better there, too: ([\d.]+) ±",
    },
    "cifar10/fast with eight epochs": {
        CPU: r"B, bf16 units \| bfloat16 \| ([\d.]+) %",
        "configs/cifar10/fast.yaml": r"and six views it had ([\d.]+) %",
    },
    "photographs of TrashNet to train on": {
        "README.md": r"trained on ([\d,]+) photographs of six kinds of rubbish",
        CPU: r"by the authors' lists: ([\d,]+), 328 and 431",
        "configs/finetune-head.yaml": r"after ([\d,]+) for training",
    },
    "top-1 on TrashNet": {
        "README.md": r"got ([\d.]+) % of 431 others right",
        CPU: r"of the test photographs right, a mean of ([\d.]+) %",
        "configs/finetune-head.yaml": r"got ([\d.]+) % of TrashNet's 431",
    },
    "the run of the report's picture": {
        "docs/report.md": r"classifies ([\d.]+) % of CIFAR-10's test images",
        "docs/explain.md": r"right about ([\d.]+) % of the test images",
        "README.md": r"A report of a run: ([\d.]+) % on CIFAR-10",
    },
    "cifar10/airbench on a CPU": {
        "docs/mixed_precision.md": r"reached ([\d.]+) ± 0.13 % in bf16",
        CPU: r"airbench` \| A \| bfloat16 \| ([\d.]+) %",
        RESULTS: ROW.format("cifar10/airbench", 5, "A"),
        "configs/cifar10/airbench.yaml": r"Measured: ([\d.]+) %",
    },
    "cifar10/airbench with AVX2": {
        "docs/mixed_precision.md": r"and ([\d.]+) ± 0.13 % in float32",
        CPU: r"airbench` \| A kept to AVX2 \| float32 \| ([\d.]+) %",
        RESULTS: ROW.format(r"cifar10/airbench \(avx2\)", 5, "A"),
        "configs/cifar10/airbench.yaml": r"bfloat16; ([\d.]+) % in",
    },
    "cifar10/airbench on an H100": {
        H100: r"`fast`: `cifar10/airbench`, 25 seeds \| ([\d.]+) ±",
        RESULTS: ROW.format("cifar10/airbench", 25, "D"),
        "README.md": r"`cifar10/airbench` ([\d.]+) % in 3.8 s",
        "configs/cifar10/airbench.yaml": r"AVX2; ([\d.]+) % \(mean of 25",
    },
    "imagenette/resnet10t": {
        "docs/export.md": r"validated in bfloat16, has ([\d.]+) %",
        CPU: r"\| 90 % \| not reached: ([\d.]+) % after",
    },
    "ResNet-18 on CIFAR-10 in the literature": {
        H100: r"`resnet18-short` \|.*?\| ([\d.]+) %",
        "configs/cifar10/resnet18.yaml": r"Literature: ([\d.]+) %",
        "configs/cifar10/resnet18_short.yaml": r"Literature: ([\d.]+) %",
    },
    "images that a core decodes": {
        CPU: r"of 224, one worker: (\d+) images/s",
        "docs/distributed.md": r"that a core decodes: (\d+) of",
    },
    "ResNet-50 on an H100": {
        H100: r"`resnet50-bf16`, two rounds \| ([\d,]+) images/s",
        "docs/distributed.md": r"images/s of one GPU: ([\d,]+) with",
        "docs/limits.md": r"in bf16 at ([\d,]+) images/s",
    },
    "kills": {
        "README.md": r"(\d+) times `kill -9`",
        "docs/resume_and_faults.md": r"(\d+) kills, no difference",
    },
    "kills of one command": {
        "README.md": r"\[(\d+) kills with your settings",
        "docs/resume_and_faults.md": r"verify_resume.py --kills (\d+) ",
    },
    "most pixels of an image": {
        "docs/predict.md": r"more than ([\d,]+) pixels",
        "docs/serve.md": r"Pillow's own limit of ([\d,]+)\)",
    },
    "a second listing": {
        REMOVED: r"folders looked at\s+([\d.]+) .*? a worker that looks at all of them\s+[\d.]+\s+([\d.]+)",
        "docs/shards.md": r"second start takes ([\d.]+) s, and a worker needs ([\d.]+) MB",
    },
    "gradients over a slow link": {
        REMOVED: r"link of (\d+) Mbit.*\| float32, 25 MiB .*? \| [\d.]+ \| ([\d.]+) .*?bf16 --bucket-mb 5` \| [\d.]+ \| ([\d.]+) ",
        "docs/distributed.md": r"joined by (\d+) Mbit/s, bf16 in pieces of 5 MiB raised the speed from ([\d.]+) to ([\d.]+) ",
    },
    "requests that come together": {
        REMOVED: r"32 clients,? the server handled ([\d.]+) times",
        "docs/serve.md": r"32 clients,? the server handled ([\d.]+) times",
    },
    "FashionMNIST on two processes": {
        "docs/distributed.md": r"\| float32 \|[^|]*\| ([\d.]+) ±",
        "CHANGELOG.md": r"([\d.]+) % without, on FashionMNIST",
    },
    "the first command on other processors": {
        "docs/limits.md": r"reaches ([\d.]+) % or ([\d.]+) %",
        CPU: r"reaches ([\d.]+) % with two threads and ([\d.]+) % with one",
    },
    "how finetune ends": {
        "README.md": r"at most (\d+) epochs, fewer if the validation loss has not improved for (\d+)\.",
        "configs/finetune.yaml": r"epochs: (\d+) early-stopping: (\d+)",
    },
    "images of ImageNet": {
        "docs/distributed.md": r"ImageNet has ([\d,]+) images",
        "docs/limits.md": r"90 epochs of ([\d,]+) images",
    },
    "weights of ResNet-50": {
        "docs/distributed.md": r"ResNet-50 ([\d.]+) million",
        "docs/limits.md": r"ResNet-50's ([\d.]+) million",
    },
    "validation images of Imagenette": {
        CPU: r"Imagenette's ([\d,]+) validation images",
        "docs/export.md": r"([\d,]+) validation images, in float32",
        "docs/limits.md": r"three of Imagenette's ([\d,]+)\.",
        "docs/report.md": r"Imagenette's ([\d,]+) validation images",
    },
    "the run of Imagenette in the pictures": {
        "docs/report.md": r"([\d.]+) % of Imagenette's",
        "docs/run_folder.md": r"seed 1: ([\d.]+) % after 40 epochs",
        CPU: r"\| 90 % \|[^|]*\| not reached: ([\d.]+) % after",
    },
    "imagenette/resnet10t_muon": {
        CPU: r"three seeds, beside other work\), ([\d.]+) % after",
        RESULTS: ROW.format("imagenette/resnet10t_muon", 3, "A, 1 thread"),
        "configs/imagenette/resnet10t_muon.yaml": r"Measured: ([\d.]+) %",
        "README.md": r"resnet10t_muon` \| ([\d.]+) ±",
    },
    "the digits after python main.py": {
        "docs/export.md": r"top-1 ([\d.]+) % before",
        "docs/limits.md": r"reaches ([\d.]+) % or",
    },
}
# Numbers of four digits and more that stand on several pages by chance, most of them shares of 360 images.
COINCIDENCES = {
    *"88.89 93.34 93.65 93.76 93.85 93.88 93.97 94.01 95.28 96.94 97.22 97.78 98.24 98.33 98.36 98.75 98.89 99.17 99.44 99.72".split(),
    *"1024 4096 65536".split(),
    "93.95",  # airbench94 on the H100, a form of cifar10/fast that was tried
    "94.04",  # cifar10/airbench, whose pages stand above, and fashionmnist/conv4
}
MADE_PAGES = {RESULTS, "docs/settings.md", "docs/coming_from_timm.md", "docs/coming_from_torchvision.md"}
MADE_PART = r"(?s)<!-- made by.*?<!-- end -->"
NUMBER = r"(?<![\w.,:/#=-])(\d{1,3}(?:,\d{3})+|\d+\.\d+|\d{4,})(?![\w.]*\d|[/\w-])"


def told(page, words):
    """What the brackets of ``words`` hold on a page, whose lines are joined; a recipe's header without its signs."""
    text = PAGES[page] if page in PAGES else (ROOT / page).read_text().replace("#", "")
    found = re.search(words, text if words.startswith(r"\|") else " ".join(text.split()))
    assert found, f"{page} says nothing like {words}"
    return found.groups()


@pytest.mark.parametrize("figure", FIGURES)
def test_a_figure_is_the_same_on_all_its_pages(figure):
    said = {page: told(page, words) for page, words in FIGURES[figure].items()}
    assert len(said) > 1 and len(set(said.values())) == 1, said


def test_a_number_of_four_digits_on_several_pages_is_in_the_table_above():
    """Otherwise nobody notices when one of the pages changes. Years and round numbers are left out."""
    pages = {page: re.sub(MADE_PART, "", text) for page, text in PAGES.items() if page not in MADE_PAGES}
    pages |= {path: text for path, text in HEADERS.items() if path.startswith("configs/")}
    watched = {
        (page, number)
        for figure in FIGURES.values()
        for page, words in figure.items()
        for number in re.findall(r"[\d,.]*\d", " ".join(filter(None, told(page, words))))
    }
    standing = {}
    for page, text in pages.items():
        for number in set(re.findall(NUMBER, " ".join(text.split()))) - COINCIDENCES:
            if len(re.sub("[.,]", "", number).strip("0")) >= 4 and not re.fullmatch(r"(19|20)\d\d", number):
                standing.setdefault(number, set()).add(page)
    several = {number: where for number, where in standing.items() if len(where) > 1}
    written = {number: where for number, where in several.items() if any(page in PAGES for page in where)}
    assert len(written) > 10
    left = {number: {page for page in where if (page, number) not in watched} for number, where in written.items()}
    assert {number: where for number, where in left.items() if where} == {}


# ------------------------------------------------------------------------------------ completeness


def test_every_script_is_mentioned():
    internal = {"__init__.py", "environment.sh"}
    scripts = {path.name for path in (*ROOT.glob("scripts/*.*"), *ROOT.glob("scripts/lab/*.*"))} - internal
    mentioned = "\n".join(PAGES.values())
    assert {name for name in scripts if name not in mentioned} == set(), "docs/index.md lists the commands"


USUAL_OPTIMIZERS = {"sgd", "adam", "adamw"}  # no technique


@pytest.mark.parametrize(
    ("page", "names"),
    [
        pytest.param("docs/data.md", SPECS, id="data sets"),
        pytest.param("docs/networks.md", OWN, id="networks"),
        pytest.param("docs/data.md", AUGMENTATIONS, id="augmentations"),
        pytest.param("docs/techniques.md", LOSSES, id="losses"),
        pytest.param("docs/techniques.md", LR_POLICIES, id="learning-rate policies"),
        pytest.param("docs/techniques.md", optimizers.OWN.keys() - USUAL_OPTIMIZERS, id="optimizers"),
        pytest.param("docs/run_folder.md", [metric.column for metric in metrics().values()], id="metrics"),
    ],
)
def test_the_page_names_all_of_them(page, names):
    spans = " ".join(code_spans(PAGES[page])).split()
    assert set(names) - set(spans) == set(), f"{page} has no line on them"


def test_the_page_names_the_settings_that_need_whole_weights_and_no_others():
    words = PAGES["docs/distributed.md"].partition("**What it excludes.**")[2].partition(";")[0]
    refused = {flag_of(option.name) for _, option in all_settings() if option.metadata["unsharded"]}
    assert {span for span in code_spans(words) if span.startswith("--")} == refused, "docs/distributed.md"


def test_the_quoted_preprocessing_is_that_of_the_weights():
    args = arguments.parse(
        ["--dataname", "folder", "--datapath", "my_data", "--arch", "vit_tiny_patch16_224", "--pretrained"]
    )
    _, line = resolve(args.data, known_preprocessing(args, None, None))
    assert f"Preprocessing  {line}\n" in PAGES["docs/preprocessing.md"]


# ----------------------------------------------------------------------------------- architecture


def test_the_picture_of_the_layers_is_the_tests():
    picture = next(block for block in blocks(PAGES[ARCHITECTURE]) if "utils/config/" in block)
    drawn = picture.splitlines()
    rows = []
    for row in reversed(LAYERS):
        names = [name.replace(".", "/") for name in row]
        (line,) = {
            n for n, line in enumerate(drawn) for name in names if re.search(rf"(?<![\w/]){name}(/ |\.py)", line)
        }
        assert all(name in drawn[line] for name in names)
        rows.append(line)
    assert rows == sorted(rows) == list(range(len(drawn)))


def test_every_name_of_the_code_exists():
    code = "\n".join(path.read_text() for path in (*FILES.values(), *ROOT.glob("tests/**/*.py")))
    words = set(re.findall(r"\w+", code))
    files = {path.name for path in ROOT.rglob("*.*") if ".venv" not in path.parts}
    for page in (ARCHITECTURE, "CONTRIBUTING.md"):
        names = {span.partition("(")[0] for span in code_spans(PAGES[page])}
        names = {
            name for name in names if re.fullmatch(r"[A-Za-z]\w*(\.\w+)*", name) and re.search(r"[_.]|[a-z][A-Z]", name)
        }
        names |= set(re.findall(r"\b[A-Z]\w*[a-z][A-Z]\w*", "".join(blocks(PAGES[page]))))
        missing = {name for name in names if name not in files and name.split(".")[-1] not in words}
        assert missing == set(), page


def test_every_name_is_in_the_file_that_is_said_to_hold_it():
    text = " ".join(PAGES["CONTRIBUTING.md"].split())
    said = re.findall(r"`([A-Za-z_.]+)` (?:in|of) `([\w/]+\.py)`", text) + re.findall(
        r"`([A-Za-z_.]+)` \(`([\w/]+\.py)`\)", text
    )
    assert said
    for name, path in said:
        assert re.search(rf"^ *(class |def )?{name.split('.')[-1]}\b", (ROOT / path).read_text(), flags=re.M), (
            name,
            path,
        )
