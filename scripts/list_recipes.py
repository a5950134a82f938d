"""List all recipes with the top-1 that literature reports and the one measured here, from the recipes' headers.

python scripts/list_recipes.py
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.common.command_line import ToolParser, run_tool, table
from scripts.common.recipes import recipes

NAME = "list_recipes.py"


def main(argv: list[str]) -> int:
    build_parser().parse_args(argv)
    found = recipes()
    rows = [
        [recipe.name, "of another split" if recipe.on_own_split else recipe.reference_figure, recipe.measured_figure]
        for recipe in found
    ]
    print(table(["recipe", "literature", "measured"], rows))
    print(f"\n{len(found)} recipes. bash scripts/launch.sh RECIPE DATA trains one; its header in configs/ says more.")
    return 0


def build_parser() -> ToolParser:
    return ToolParser(NAME, __doc__, training_flags=False)


if __name__ == "__main__":
    sys.exit(run_tool(NAME, main))
