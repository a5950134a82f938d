"""Who may import whom, and what no source file may hold. Read from the source text, without importing it."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("data", "optim", "precision", "record")
LONGEST_FILE = 500  # lines


def source_files():
    """All Python files of the program: main.py, models/, utils/ and scripts/."""
    folders = [path for name in ("models", "utils", "scripts") for path in (ROOT / name).rglob("*.py")]
    return sorted([ROOT / "main.py", *folders])


def module_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_of(path): path for path in source_files()}
TREES = {module: ast.parse(path.read_text(encoding="utf-8")) for module, path in FILES.items()}


def imports_of(tree, modules):
    """The modules of ours that a file imports, wherever in it, also for type checkers only."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in modules else node.module for name in inner}
    return {name for name in found if name.split(".")[0] in ("main", "models", "utils", "scripts")}


IMPORTS = {module: imports_of(tree, FILES) for module, tree in TREES.items()}


def allowed_for(module):
    """The modules, or packages, that ``module`` may import; None for all."""
    if module == "main" or module.split(".")[0] == "scripts":
        return None
    if module == "models.load":  # stands between the networks and what a run leaves
        return {"models", "utils.settings", "utils.batch_norm_statistics", "utils.data.preprocessing", "utils.record"}
    if module.split(".")[0] == "models":
        return {"models", "utils.settings", "utils.distributed"}
    if module.count(".") == 2:
        return {module.rpartition(".")[0], "utils.settings", "utils.distributed", "utils.cpu"}
    return {
        "utils.console": set(),
        "utils.setting": set(),
        "utils.settings": {"utils.setting"},
        "utils.cpu": set(),
        "utils.long_work": {"utils.settings"},
        "utils.distributed": {"utils.settings", "utils.cpu", "utils.long_work"},
        "utils.consistency": {"utils.settings"},
        "utils.scenario": {"utils.settings"},
        "utils.synonyms": set(),
        "utils.arguments": {"utils.setting", "utils.settings", "utils.consistency", "utils.synonyms"},
        "utils.tools": {"utils.console", "utils.setting", "utils.settings", "utils.arguments", "utils.cpu"},
        "utils.train_validation": {
            "utils.settings",
            "utils.distributed",
            "utils.step_watch",
            "utils.step_sums",
            "utils.stopping",
            "utils.exact_validation",
            "utils.batch_norm_statistics",
            "utils.bad_images",
            *(f"utils.{room}" for room in ROOMS),
        },
        "utils.step_watch": {"utils.settings", "utils.distributed", *(f"utils.{room}" for room in ROOMS)},
        "utils.step_sums": {"utils.distributed", "utils.data", "utils.record"},
        "utils.exact_validation": {"utils.distributed", "utils.bad_images", "utils.data", "utils.record"},
        "utils.batch_norm_statistics": {"utils.distributed", "utils.data"},
        "utils.bad_images": {"utils.distributed", "utils.data", "utils.record"},
        "utils.stopping": {"utils.console", "utils.distributed"},
        "utils.run_record": {
            "utils.settings",
            "utils.arguments",
            "utils.distributed",
            "utils.scenario",
            *(f"utils.{room}" for room in ROOMS),
        },
        "utils.doctor": {"utils.precision"},
        "utils.doctor_measure": {"utils.settings", "utils.train_validation", "utils.data", "utils.precision"},
        "utils.doctor_memory": {"utils.doctor", "utils.train_validation", "utils.data", "utils.precision"},
        "utils.doctor_trials": {
            "utils.settings",
            "utils.distributed",
            "utils.cpu",
            "utils.doctor",
            "utils.doctor_measure",
            "utils.train_validation",
            "utils.data",
            "utils.precision",
        },
        "utils.doctor_report": {"utils.doctor", "utils.precision", "utils.tools"},
        "utils.effects": {
            "utils.settings",
            "utils.batch_norm_statistics",
            "utils.consistency",
            "utils.distributed",
            "utils.data",
            "utils.optim",
            "utils.precision",
        },
        "utils.dry_run": {
            "utils.settings",
            "utils.distributed",
            "utils.batch_norm_statistics",
            *(f"utils.{room}" for room in ROOMS),
        },
    }.get(module, {"utils.settings", "utils.distributed"})


def is_inside(module, packages):
    return any(module == package or module.startswith(f"{package}.") for package in packages)


@pytest.mark.parametrize("module", [module for module in FILES if allowed_for(module) is not None])
def test_module_imports_only_what_its_place_allows(module):
    assert {name for name in IMPORTS[module] if not is_inside(name, allowed_for(module))} == set()


def test_every_room_of_the_program_is_there():
    inside = [module.split(".") for module in FILES if module.startswith("utils.") and module.count(".") == 2]
    assert {parts[1] for parts in inside} == set(ROOMS)


def test_nothing_imports_the_main_program_but_scripts():
    assert [module for module, names in IMPORTS.items() if "main" in names and not module.startswith("scripts")] == []


def test_the_loop_knows_what_builders_make_and_not_the_builders():
    names = {
        alias.name
        for node in ast.walk(TREES["utils.train_validation"])
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert {"TrainLoader", "Checkpointer"} <= names
    assert [name for name in names if name.startswith("build_") or name in ("loaders", "get_data", "parse")] == []


def test_there_is_no_import_cycle():
    order = TopologicalSorter({module: names & set(FILES) - {module} for module, names in IMPORTS.items()})
    assert len(list(order.static_order())) == len(FILES)  # raises CycleError on a cycle


def test_settings_and_distributed_import_nothing_heavy_when_they_are_imported():
    for module in (
        "utils.setting",
        "utils.settings",
        "utils.long_work",
        "utils.distributed",
        "utils.arguments",
        "utils.scenario",
        "utils.consistency",
        "utils.console",
    ):
        at_once = [node for node in TREES[module].body if isinstance(node, ast.Import | ast.ImportFrom)]
        roots = {alias.name.split(".")[0] for node in at_once if isinstance(node, ast.Import) for alias in node.names}
        roots |= {node.module.split(".")[0] for node in at_once if isinstance(node, ast.ImportFrom)}
        assert not roots & {"torch", "torchvision", "timm", "numpy", "sklearn", "yaml", "tqdm", "PIL"}, module


@pytest.mark.parametrize("module", FILES)
def test_no_file_imports_a_star(module):
    names = [alias.name for n in ast.walk(TREES[module]) if isinstance(n, ast.ImportFrom) for alias in n.names]
    assert "*" not in names


@pytest.mark.parametrize("module", FILES)
def test_no_file_is_too_long(module):
    assert len(FILES[module].read_text(encoding="utf-8").splitlines()) <= LONGEST_FILE


def unsafe_calls(tree):
    """Every way to load a pickle that runs code."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if called in (
            "pickle.load",
            "pickle.loads",
            "pickle.Unpickler",
            "yaml.load",
            "yaml.unsafe_load",
            "eval",
            "exec",
        ):
            yield called
        if called == "torch.load" and options.get("weights_only") != "True":
            yield called
        if called in ("np.load", "numpy.load") and options.get("allow_pickle", "False") != "False":
            yield called


@pytest.mark.parametrize("module", FILES)
def test_no_file_loads_what_can_run_code(module):
    assert list(unsafe_calls(TREES[module])) == []
    assert "weights_only=False" not in FILES[module].read_text(encoding="utf-8").replace(" ", "")


# ------------------------------------------------------------------------- the checks themselves


def test_checks_see_an_import_wherever_it_hides():
    text = """
from typing import TYPE_CHECKING
import torch, utils.scenario
if TYPE_CHECKING:
    from utils.record import checkpoint
def later():
    from utils.data.loaders import loaders
    import main
"""
    modules = {"utils.scenario", "utils.record.checkpoint", "utils.data.loaders"}
    assert imports_of(ast.parse(text), modules) == modules | {"main"}


@pytest.mark.parametrize(
    "call", ["pickle.loads(x)", "torch.load(p)", "torch.load(p, weights_only=False)", "yaml.load(f)"]
)
def test_checks_see_an_unsafe_call(call):
    assert list(unsafe_calls(ast.parse(call))) == [call.partition("(")[0]]
