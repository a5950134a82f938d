"""Break the code on purpose, line by line, and list the breaks that no test notices: ``mutation.py [MUTANT ...]``

mutmut does the work; ``[tool.mutmut]`` in pyproject.toml lists the modules that it breaks and the tests that must
notice. This adds mutants that remove a statement, a condition or a part of one, and mutants within decorated functions.
A run takes hours. ``mutants/`` keeps the results: the next run tries only mutants that survived or whose code changed.
MUTANT is a name as printed, or a pattern such as '*metrics*'.

``tests/equivalent_mutants.yaml`` lists the mutants that behave as the original, and why. For every other mutant that
survives, the changed line is printed, and the exit code is 1.
"""

from __future__ import annotations

import importlib
import os
import resource
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

if __name__ == "__main__" and {"-h", "--help"} & set(sys.argv[1:]):  # before imports that take seconds
    print(__doc__)
    sys.exit(0)

ROOT = Path(__file__).resolve().parents[1]
REVIEWED = ROOT / "tests" / "equivalent_mutants.yaml"
MUTANTS_AT_ONCE = 1
CAUGHT = ("killed", "timeout")
NOT_RUN = 255  # pytest refused to begin, for example at a test's name; mutmut counts it with those that ran out of time
MEMORY_BYTES = 16 << 30  # a mutant may ask for any amount
SLOW_IMPORTS = (  # once, before a process is forked for each mutant
    "torch._dynamo", "torch.utils.tensorboard", "torchvision.transforms.v2", "timm", "sklearn.datasets",
    "sklearn.metrics", "matplotlib.pyplot", "hypothesis",
)  # fmt: skip

try:
    import libcst as cst
    import yaml
    from mutmut import __main__ as program
    from mutmut.mutation import file_mutation, mutators
    from mutmut.mutation.data import SourceFileMutationData
    from mutmut.mutation.diff_apply import get_diff_for_mutant
    from mutmut.stats import status_by_exit_code
    from mutmut.utils.file_utils import walk_mutatable_files
except ImportError as error:
    sys.exit(f"mutation.py: {error}; pip install -r requirements-dev.txt")


# ------------------------------------------------------------------------------------ more kinds of mutants


def code_of(node: cst.CSTNode) -> str:
    return " ".join(cst.Module([]).code_for_node(node).split())


def without_statement(node: cst.Expr | cst.Raise | cst.Assign) -> Iterator[cst.CSTNode]:
    """A text that quotes the statement replaces it; docstrings and yields stay."""
    if isinstance(node, cst.Expr) and isinstance(node.value, cst.BaseString | cst.Yield):
        return
    if isinstance(node, cst.Assign) and all(isinstance(target.target, cst.Name) for target in node.targets):
        return  # without it most names are undefined, and mutmut itself sets them to None
    yield cst.Expr(cst.SimpleString(repr(f"without: {code_of(node)}")))


def without_condition(node: cst.If | cst.CompIf) -> Iterator[cst.CSTNode]:
    """The condition is still evaluated, but always or never holds."""
    held = node.test.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
    for operator, constant in ((cst.Or(), "True"), (cst.And(), "False")):
        yield node.with_changes(test=cst.BooleanOperation(held, operator, cst.Name(constant)))


def without_part(node: cst.BooleanOperation) -> Iterator[cst.CSTNode]:
    for part in (node.left, node.right):
        yield part.with_changes(lpar=[*node.lpar, *part.lpar], rpar=[*part.rpar, *node.rpar])


def text_once(node: cst.BaseString) -> Iterator[cst.BaseString]:
    """The first of mutmut's three other texts: a test that notices one notices all."""
    yield from list(mutators.operator_string(node))[:1]


def add_kinds() -> None:
    """Add the mutants above to mutmut, and let it mutate decorated functions."""
    operators = mutators.mutation_operators
    operators[:] = [(kind, text_once if made is mutators.operator_string else made) for kind, made in operators]
    operators += [(kind, without_statement) for kind in (cst.Expr, cst.Raise, cst.Assign)]
    operators += [(kind, without_condition) for kind in (cst.If, cst.CompIf)]
    operators.append((cst.BooleanOperation, without_part))

    visitor, skips = file_mutation.MutationVisitor, file_mutation.MutationVisitor._skip_node_and_children
    arranged = file_mutation.function_trampoline_arrangement

    def skips_undecorated(self: file_mutation.MutationVisitor, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.FunctionDef) and node.decorators:
            node = node.with_changes(decorators=())
        return skips(self, node)

    def arrange(function: cst.FunctionDef, *arguments: object, **named: object) -> tuple:
        """Decorators stay on the chooser; its copies keep only @classmethod and @staticmethod."""
        declared, (chooser, *copies), assigned, names = arranged(function, *arguments, **named)
        kept = [one for one in function.decorators if code_of(one) in ("@classmethod", "@staticmethod")]
        return declared, [chooser, *(copy.with_changes(decorators=kept) for copy in copies)], assigned, names

    visitor._skip_node_and_children = skips_undecorated
    file_mutation.function_trampoline_arrangement = arrange


# ------------------------------------------------------------------------------------ results


def became(name: str, path: Path) -> str:
    """The lines that mutant ``name`` changes, joined into one."""
    lines = get_diff_for_mutant(name, path=path).splitlines()[2:]
    return " ".join(" ".join(line[1:] for line in lines if line.startswith("+")).split())


def status_of(code: int | None) -> str:
    """mutmut's word for how the tests of a mutant ended."""
    return "not run" if code == NOT_RUN else status_by_exit_code[code]


def reviewed() -> set[tuple[str, str]]:
    """(file, changed line) of each mutant that is known to behave as the original."""
    groups = yaml.safe_load(REVIEWED.read_text(encoding="utf-8")) if REVIEWED.exists() else []
    return {(group["file"], line) for group in groups for line in group["lines"]}


def report() -> int:
    """Print a row per file and the survivors. Returns the number of survivors that nobody has reviewed."""
    equivalent, columns = reviewed(), (*CAUGHT, "survived", "no tests", "other", "equivalent")
    survivors, total = [], Counter()
    print(f"{'':36}{'mutants':>9}" + "".join(f"{column:>11}" for column in columns))
    for path in sorted(walk_mutatable_files()):
        data, counts = SourceFileMutationData(path=path), Counter()
        data.load()
        for name, code in data.exit_code_by_key.items():
            status = status_of(code)
            counts[status if status in columns else "other"] += 1
            if status in CAUGHT:
                continue
            line = became(name, path)
            if (str(path), line) in equivalent:
                counts["equivalent"] += 1
            else:
                survivors.append(f"{name}: {status}\n    {line}")
        mutants = len(data.exit_code_by_key)
        print(f"{path!s:36}{mutants:9}" + "".join(f"{counts[column]:11}" for column in columns))
        total += counts + Counter(mutants=mutants)
    print(f"{'together':36}{total['mutants']:9}" + "".join(f"{total[column]:11}" for column in columns))
    print("\n".join(survivors))
    return len(survivors)


def main(names: list[str]) -> int:
    os.chdir(ROOT)
    os.environ["OMP_NUM_THREADS"] = "1"
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    add_kinds()
    for module in SLOW_IMPORTS:
        importlib.import_module(module)
    if not names:
        program._reset_mutant_results(lambda name, code: status_of(code) not in CAUGHT)
    program._run(names, MUTANTS_AT_ONCE)
    print()
    return bool(report())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
