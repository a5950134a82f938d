"""Who may import whom, how large things may grow, and what no source file may hold. Read from the source text alone."""

import ast
import functools
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# From the bottom up: a package imports only from packages further down this list, never from one in its own row.
LAYERS = (
    ("utils.config",),
    ("utils.plugin",),  # the decorators of users' files
    ("utils.runtime",),
    ("utils.checkpoint", "utils.precision"),
    ("utils.optim",),
    ("utils.data",),
    ("utils.record",),
    ("utils.run",),
    ("models", "utils.loop"),  # models.load_model reads checkpoints and makes their preprocessing
    ("utils.train_validation",),
    ("components",),
    ("training",),
    ("main",),
    ("scripts.common",),
    ("scripts",),  # a command, or the folder of its parts
)
# lines
LONGEST_FUNCTION = 60
MOST_PARAMETERS = 8
MANY_PARAMETERS = [("utils.train_validation", "__init__")]  # TraVal's, which users' programs call


def source_files():
    """All Python files of the program."""
    folders = [path for name in ("models", "utils", "scripts") for path in (ROOT / name).rglob("*.py")]
    return sorted([*ROOT.glob("*.py"), *folders])


def module_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_of(path): path for path in source_files()}


@functools.cache  # as all below that takes a second: every process of the tests imports this file, one needs it
def trees():
    return {module: ast.parse(path.read_text(encoding="utf-8")) for module, path in FILES.items()}


@functools.cache
def all_nodes():
    """All nodes of each file, which it takes seconds to walk through."""
    return {module: [*ast.walk(tree)] for module, tree in trees().items()}


def imports_of(nodes, modules):
    """The modules of ours that a file imports, wherever in it, also for type checkers only."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in modules else node.module for name in inner}
    return {
        name for name in found if name.split(".")[0] in ("main", "training", "components", "models", "utils", "scripts")
    }


@functools.cache
def imports():
    return {module: imports_of(found, FILES) for module, found in all_nodes().items()}


def layer_of(module):
    """The layer (0 is the lowest) and the package in it that ``module`` belongs to; None for an empty package."""
    rows = [
        (level, package)
        for level, row in enumerate(LAYERS)
        for package in row
        if module == package or module.startswith(f"{package}.")
    ]
    return max(rows, key=lambda row: len(row[1]), default=None)


def may_import(importer, imported):
    """Whether the layers allow ``importer`` to import ``imported``."""
    upper = layer_of(importer)
    lower = layer_of(imported)
    if upper == lower and upper[1] == "scripts":  # a command knows the parts in its folder and in others'; parts do not
        folder = imported.split(".")[1]
        return importer.split(".")[1] == folder or (importer.count(".") == 1 and folder != "lab")
    return upper == lower or lower[0] < upper[0]


def test_imports_run_downwards():
    assert [module for module, names in imports().items() if names and layer_of(module) is None] == []
    wrong = {module: {name for name in names if not may_import(module, name)} for module, names in imports().items()}
    assert {module: names for module, names in wrong.items() if names} == {}


def test_every_package_of_utils_has_a_layer():
    packages = {".".join(module.split(".")[:2]) for module in FILES if module.startswith("utils.")}
    assert packages == {package for row in LAYERS for package in row if package.startswith("utils.")}


def test_the_loop_knows_what_builders_make_and_not_the_builders():
    names = {
        alias.name
        for node in all_nodes()["utils.train_validation"]
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert {"TrainLoader", "ValidationLoader"} <= names
    assert [name for name in names if name.startswith("build_") or name in ("loaders", "get_data", "parse")] == []


def test_the_settings_of_a_run_are_replaced_at_one_point():
    """Only ``Run`` itself assigns them, once (``Run.settle``)."""
    assigned = [
        (module, ast.unparse(target))
        for module in FILES
        for node in all_nodes()[module]
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Attribute) and target.attr == "args"
    ]
    assert [place for place in assigned if place[1] != "self.args"] == []
    assert assigned.count(("utils.run", "self.args")) == 1


def test_there_is_no_import_cycle():
    order = TopologicalSorter({module: names & set(FILES) - {module} for module, names in imports().items()})
    assert len(list(order.static_order())) == len(FILES)  # raises CycleError on a cycle


def test_what_runs_before_the_settings_are_known_imports_nothing_heavy():
    light = [module for module in FILES if module.startswith("utils.config.")]
    for module in (*light, "utils.runtime.process", "utils.runtime.cpu", "utils.record.run_folder"):
        at_once = [node for node in trees()[module].body if isinstance(node, ast.Import | ast.ImportFrom)]
        roots = {alias.name.split(".")[0] for node in at_once if isinstance(node, ast.Import) for alias in node.names}
        roots |= {node.module.split(".")[0] for node in at_once if isinstance(node, ast.ImportFrom)}
        assert not roots & {"torch", "torchvision", "timm", "numpy", "sklearn", "yaml", "tqdm", "PIL"}, module


# -------------------------------------------------------------------------------------------- sizes


def functions_of(nodes):
    return [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def parameters_of(function):
    arguments = function.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return [name for name in names if name not in ("self", "cls")]


def test_no_function_is_too_long_or_takes_too_many_parameters():
    functions = [(module, node) for module, found in all_nodes().items() for node in functions_of(found)]
    long = [(module, node.name) for module, node in functions if node.end_lineno - node.lineno >= LONGEST_FUNCTION]
    many = [(module, node.name) for module, node in functions if len(parameters_of(node)) > MOST_PARAMETERS]
    assert long == [] and many == MANY_PARAMETERS


# ------------------------------------------------------------------------------------------- safety


def unsafe_calls(nodes):
    """Every way to load a pickle that runs code."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module in ("torch", "numpy", "pickle", "yaml"):
            yield from (
                f"from {node.module} import {name.name}"
                for name in node.names
                if name.name.endswith(("load", "loads", "Unpickler"))
            )
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
        if called in ("np.load", "numpy.load") and (options.get("allow_pickle", "False") != "False" or node.args[2:]):
            yield called


def test_no_file_loads_what_can_run_code():
    assert {module: calls for module, found in all_nodes().items() if (calls := list(unsafe_calls(found)))} == {}
    for module, path in FILES.items():
        assert "weights_only=False" not in path.read_text(encoding="utf-8").replace(" ", ""), module


# ------------------------------------------------------------------------- the checks themselves


def test_checks_see_an_import_wherever_it_hides():
    text = """
from typing import TYPE_CHECKING
import torch, utils.record.run_folder
if TYPE_CHECKING:
    from utils.checkpoint import checkpoint
def later():
    from utils.data.loaders import loaders
    import main
"""
    modules = {"utils.record.run_folder", "utils.checkpoint.checkpoint", "utils.data.loaders"}
    assert imports_of(ast.walk(ast.parse(text)), modules) == modules | {"main"}


@pytest.mark.parametrize(
    "call",
    [
        *("pickle.loads(x)", "torch.load(p)", "torch.load(p, weights_only=False)", "yaml.load(f)"),
        *("np.load(p, None, True)", "np.load(p, allow_pickle=True)"),
    ],
)
def test_checks_see_an_unsafe_call(call):
    assert list(unsafe_calls(ast.walk(ast.parse(call)))) == [call.partition("(")[0]]


@pytest.mark.parametrize(
    ("importer", "imported", "allowed"),
    [
        ("utils.loop.validation", "utils.record.metrics", True),
        ("utils.record.metrics", "utils.loop.validation", False),
        ("utils.data.loaders", "utils.record.metrics", False),  # rooms of one layer do not know each other
        ("utils.data.loaders", "scripts.common.command_line", False),
        ("scripts.audit.report", "scripts.tuning.diagnosis", False),  # nor do folders of scripts
        ("scripts.lab.benchmark", "scripts.lab.benchmarks.measure", True),  # the laboratory is such a folder
        ("scripts.lab.benchmark", "scripts.tuning.diagnosis", False),
        ("scripts.doctor", "scripts.lab.benchmarks.measure", False),  # which users' commands do not enter
        ("scripts.audit.report", "scripts.common.timing", True),
        ("scripts.doctor", "scripts.tuning.diagnosis", True),
    ],
)
def test_checks_know_up_from_down(importer, imported, allowed):
    assert may_import(importer, imported) == allowed
