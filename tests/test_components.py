"""The plan of ``--dry-run`` shows every setting that shapes the result."""

import dataclasses

import pytest
import torch

import main
from components import build
from models import build_model
from models.prepare import prepare_network
from tests.helpers import image_tree, trained
from tests.utils.config.examples import ELSEWHERE, SHAPES_RESULT, context, example
from utils.config import arguments
from utils.config.groups.model import ModelSettings
from utils.config.groups.run import RunSettings
from utils.data.datasets import get_data
from utils.precision import amp
from utils.run import Run
from utils.runtime.distributed import Distributed, RankInfo

BASE = ("--dry-run", "--device", "cpu", "--arch", "conv2")

PLANS = {}  # by context
OF_A_TEACHER = {"teacher", "distillation", "distillation_alpha", "distillation_temperature"}  # see its own tests


def shown(capsys, *flags):
    """The plan as {title: text}, without the run folder, whose name holds the time."""
    assert main.main([*BASE, *flags]) == 0
    out, err = capsys.readouterr()
    assert err == "", "a setting without an effect shapes nothing"
    rows = {line[:14].strip(): line[15:] for line in out.splitlines()}
    assert rows.pop("Run folder").endswith("(not created)")
    return rows


@pytest.mark.parametrize("name", [name for name in SHAPES_RESULT if name not in ELSEWHERE | OF_A_TEACHER])
def test_each_setting_that_shapes_the_result_changes_the_plan(name, workplace, capsys):
    if name in ("weights", "new_head"):
        model = build_model(ModelSettings(arch="conv2"), classes=10, channels=1, image_size=8)
        torch.save(model.state_dict(), "weights.pt")
    without = context(name)
    if without not in PLANS:  # most settings have the same context
        PLANS[without] = shown(capsys, *without.split())
    assert PLANS[without] != shown(capsys, *without.split(), *example(name).split()), (
        f"{example(name)} is not in the plan{f' of {without}' * bool(without)}: name it in the describe() of the part "
        "that reads it, or in the plan of its field. If it acts only with another flag, declare that as its effect"
    )


def test_of_images_in_files_the_share_kept_for_validation_and_the_crop_are_in_the_plan(workplace, capsys):
    image_tree(workplace, {".": 20})
    line = "--dataname folder --datapath . --image-size 8 --val-split"
    plans = [shown(capsys, *line.split(), share) for share in ("0.11", "0.12")]  # of the same number of images
    assert plans[0]["Data"] != plans[1]["Data"]
    assert shown(capsys, *line.split(), "0.11", "--val-split-by", "draw")["Data"] != plans[0]["Data"]
    assert shown(capsys, *line.split(), "0.11", "--crop-mode", "squash") != plans[0]


def test_pretrained_weights_and_tf32_on_a_gpu_are_in_the_plan(workplace, monkeypatch):
    args = arguments.parse([*BASE])
    with Distributed(RankInfo(), args.run) as distributed:
        network = build(Run(args, distributed)).network
        monkeypatch.setattr("models.prepare.build_model", lambda *_, **__: network.model)
        monkeypatch.setattr("models.prepare.begins_anew", lambda *_: "")
        monkeypatch.setattr("models.prepare.trained_image_size", lambda *_: None)
        pretrained = dataclasses.replace(args, model=dataclasses.replace(args.model, pretrained=True))
        data = get_data(args.data, distributed.device)
        other = prepare_network(pretrained, data, distributed.device, None, None)
    assert network.describe(args.model) != other.describe(pretrained.model)
    precisions = [dataclasses.replace(args.precision, amp="off", tf32=tf32) for tf32 in (None, True, False)]
    assert len({amp.describe(precision, torch.device("cuda")) for precision in precisions}) == 3


def test_what_several_processes_exchange_is_in_the_plan():
    changes = ["", "--grad-compression bf16", "--bucket-mb 5"]
    exchanges = [arguments.parse(flags.split()).exchange for flags in changes]
    alone = Distributed(RankInfo(), RunSettings(device="cpu"))
    several = Distributed(RankInfo(1, 4), RunSettings(device="cpu"))
    rows = {several.describe(torch.nn.Identity(), exchange).get("Exchange") for exchange in exchanges}
    assert rows == {None, "gradients in bf16", "gradients in pieces of 5 MiB"}
    assert all("Exchange" not in alone.describe(torch.nn.Identity(), exchange) for exchange in exchanges)


def test_the_plan_of_a_resumed_run_says_what_it_goes_on_from(workplace, capsys):
    run = trained(workplace / "runs", "--arch", "fc", "--max-steps", 2)
    capsys.readouterr()
    assert main.main(["--dry-run", "--device", "cpu", "--resume", str(run)]) == 0
    out = capsys.readouterr().out
    assert f"resumes from {run}/checkpoints/last.pt" in out and f"{run} (continues there)" in out
