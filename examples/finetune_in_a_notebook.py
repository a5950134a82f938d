"""Train a network on class folders of photographs and write a page about it; every line also runs in a notebook."""

import sys
from pathlib import Path

sys.path.insert(0, ".")  # the repository's folder
from main import main
from models import load_model
from scripts.report import main as write_report

photographs, *more = sys.argv[1:] or ["photographs"]  # in a notebook: photographs, more = "photographs", []
flags = ["--config", "finetune", "--dataname", "folder", "--datapath", photographs, "--output", "runs/photographs"]
assert main([*flags, "--resume", "auto", *more]) == 0
run = max(Path("runs/photographs").rglob("final.pt"), key=lambda path: path.stat().st_mtime).parents[1]  # the newest
write_report([str(run)])
network, classes, preprocessing = load_model(run)
