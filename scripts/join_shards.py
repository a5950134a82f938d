"""Write a checkpoint whose tensors lie in shards, as a run with --shard-model saves it, as one file for any program.

    python scripts/join_shards.py RUN --output whole.pt                          # the newest checkpoint of a run
    python scripts/join_shards.py RUN/checkpoints/best.pt --output whole.pt

The file holds everything: main.py resumes and evaluates it, with or without --shard-model, and every tool reads it.
(Shards serve as well, as long as the folder is complete.) Needs memory for the whole state, but no GPU and no other
process.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.common.command_line import ToolParser, run_tool, warn
from scripts.common.trained import find_run
from utils.config.settings import UserError

NAME = "join_shards.py"


def main(argv: list[str]) -> int:
    own = build_parser().parse_args(argv)
    output = Path(own.output)
    if output.exists():
        raise UserError(f"--output {output}: exists; give another file")
    if not output.parent.is_dir():
        raise UserError(f"--output {output}: there is no folder {output.parent}")
    from models.load import FAVOURED, are_chosen
    from utils.checkpoint import checkpoint
    from utils.checkpoint.resume import from_path

    point = from_path(find_run(own.run), warn, checkpoint.load_run)
    state = checkpoint.load(point.path)
    if are_chosen(point.path, marked=False):
        state[FAVOURED] = True  # which the name of a best.pt said
    checkpoint.write_whole(output, state)
    print(f"{output}: {output.stat().st_size / 1e6:,.1f} MB from {point.path}")
    return 0


def build_parser() -> ToolParser:
    parser = ToolParser(NAME, __doc__, training_flags=False)
    parser.add_argument("run", metavar="RUN", help="a checkpoint file, or a run folder, of which the newest is taken")
    parser.add_argument("--output", required=True, metavar="FILE", help="the file to write; must not exist")
    return parser


if __name__ == "__main__":
    sys.exit(run_tool(NAME, main))
