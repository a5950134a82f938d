"""A step's verdict, read one step late, on flags that hold optimizers on the device: nothing else changes."""

import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers import equal
from tests.utils.loop.test_between_steps import watched
from utils.loop import verdict
from utils.loop.hooks import Hooks
from utils.loop.verdict import Mailbox
from utils.optim import held
from utils.optim.held import HeldByHost
from utils.train_validation import TrainingFailure

FP16 = "--amp fp16 --init-scale 64 --max-skipped-steps 4"
# Twelve steps an epoch.
BATCHES = "--train-samples 91 --batch-size 8 --max-val-batches 4 --epochs 2 --print-freq 5 --lr-policy cosine --lr 0.01"
# Seven steps an epoch, the last of them smaller. Not finite: the first, the one that a graph records, a row over an
# epoch's end, the last.
SHORT = f"{BATCHES} --train-samples 51 {FP16}"
SKIPPED_IN_SHORT = (0, 3, 5, 6, 7, 13)
CASES = {
    "sgd": "--optimizer sgd --ema-decay 0.9",
    "adamw": "--optimizer adamw --clip-grad-norm 1 --ema-decay 0.9",
    "muon": "--optimizer muon --clip-grad-agc 0.01 --ema-decay 0.9",
    "muon-sgd": "--optimizer muon-sgd --clip-grad-value 0.5",
    "lamb, lookahead": "--optimizer lamb --lookahead 3 0.5 --grad-penalty 0.01",
    "schedule-free": "--optimizer schedulefree-adamw --lr-policy constant",
    "sharpness-aware": "--sam-rho 0.05 --swa-start-epoch 1",
    "accumulation": "--batch-size 4 --accumulate 2 --mixup 0.2",
}


class Net(nn.Module):
    """Convolutions with statistics and a random part."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.2))
        self.second = nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.head = nn.Linear(8, 10)

    def forward(self, images):
        return self.head(self.second(self.features(images)).mean((2, 3)))


@pytest.fixture
def on_device(monkeypatch):
    """Optimizers are held as on a GPU."""
    choose = held.held
    monkeypatch.setattr(verdict, "held", lambda optimizer, _: choose(optimizer, torch.device("cuda")))


def overflowing(bad, at=math.nan):
    def spoil(traval, batch, outputs):
        if traval.progress.step in bad:
            outputs.loss.mul_(at)

    return Hooks(after_forward=[spoil])


def run(flags, hooks, at_once=False):
    """A loop that has trained through. ``at_once``: each verdict is read before the next step."""
    hooks.after_update = [lambda traval: None] if at_once else []
    torch.manual_seed(0)
    traval, *_ = watched(*flags.split(), model=Net(), hooks=hooks)
    traval.fit()
    return traval


@pytest.mark.parametrize("case", CASES)
def test_it_changes_no_bit_and_no_word(case, request):
    flags = f"{SHORT} {CASES[case]}"
    expected = run(flags, overflowing(SKIPPED_IN_SHORT), at_once=True)
    request.getfixturevalue("on_device")
    late = run(flags, overflowing(SKIPPED_IN_SHORT))
    assert not any(isinstance(own, HeldByHost) for own in late.active)
    assert late.progress.skipped_steps == expected.progress.skipped_steps == len(SKIPPED_IN_SHORT)
    for name, value in expected.state().items():
        if name != "progress":
            assert equal(late.state()[name], value), name
    assert told_of(late) == told_of(expected) and len(told_of(late)) == len(SKIPPED_IN_SHORT)


def told_of(traval):
    """The lines about steps that were not finite."""
    return [line for (line, *_) in traval.writer.of("log") if "not finite: " in line and "skipped" in line]


def spoil_head(traval, batch, outputs):
    if traval.progress.step in (3, 4):
        traval.model.head.weight.grad[0, 0] = math.inf


def test_of_two_optimizers_each_is_held_on_its_own(on_device):
    """The head's gradient overflows: AdamW, which has it, waits; Muon moves, and with it the average."""
    flags = f"{BATCHES} {FP16} --optimizer muon --ema-decay 0.9"
    expected, late = (run(flags, Hooks(after_backward=[spoil_head]), at_once) for at_once in (True, False))
    assert late.progress.partly_skipped_steps == expected.progress.partly_skipped_steps == 2
    assert late.progress.skipped_steps == 0
    assert all(equal(late.state()[name], value) for name, value in expected.state().items() if name != "progress")
    assert told_of(late) == told_of(expected) and len(told_of(late)) == 2
    assert all("by AdamW, not finite: gradient of head.weight" in line for line in told_of(late))


@pytest.mark.parametrize("last", [5, 11, 12, 23])
def test_without_a_scaler_a_loss_of_infinity_leaves_the_state_of_the_step_before(last, on_device):
    """The next step has begun when the host hears of it; nothing of either may be left, in statistics or counts."""
    flags = f"{BATCHES} --amp bf16 --ema-decay 0.9 --print-freq 7"
    torch.manual_seed(0)
    before, _, saved_before = watched(*flags.split(), "--max-steps", str(last), model=Net())
    before.train(0)
    if last >= 12:
        before.validation(0)
        before.train(1)
    before.save_now("last")
    torch.manual_seed(0)
    traval, recorder, saver = watched(*flags.split(), model=Net(), hooks=overflowing((last,), math.inf))
    with pytest.raises(TrainingFailure, match=f"gradient is (inf|nan) at step {last + 1} "):
        traval.fit()
    expected, state = (one.states[-1] for one in (saved_before, saver))
    for name in ("model", "ema", "scaler"):
        assert equal(state[name], expected[name]), name
    assert equal(state["optimizer"]["state"], expected["optimizer"]["state"])
    assert state["progress"] == expected["progress"] | {"epoch_seconds": state["progress"]["epoch_seconds"]}
    rows = [row.step for (rows,) in recorder.of("curves") for row in rows]
    assert rows == [*range(1, last + 1)]


def test_too_many_skips_are_heard_of_in_the_next_step_and_leave_the_state_before_it(on_device):
    flags = f"{BATCHES} {FP16} --max-skipped-steps 1 --ema-decay 0.9 --skip-bad-images"
    torch.manual_seed(0)
    before, _, saved_before = watched(*flags.split(), "--max-steps", "5", model=Net())
    before.train(0)
    before.save_now("last")
    torch.manual_seed(0)
    traval, _, saver = watched(*flags.split(), model=Net(), hooks=overflowing((5, 6)))
    with pytest.raises(TrainingFailure, match="2 steps in a row without a finite gradient, the last step 7 "):
        traval.fit()
    expected, state = (one.states[-1] for one in (saved_before, saver))
    assert equal(state["model"], expected["model"]) and equal(state["ema"], expected["ema"])
    assert equal(state["optimizer"]["state"], expected["optimizer"]["state"])
    counts = {name: state["progress"][name] for name in ("step", "step_in_epoch", "skipped_steps", "skipped_in_row")}
    assert counts == {"step": 7, "step_in_epoch": 7, "skipped_steps": 2, "skipped_in_row": 2}


def test_the_host_waits_for_a_step_after_it_has_launched_the_passes_of_the_next(on_device, monkeypatch):
    diary = []
    sent = Mailbox.send
    read = Mailbox.read
    monkeypatch.setattr(Mailbox, "send", lambda self, flags: diary.append("launched") or sent(self, flags))
    monkeypatch.setattr(Mailbox, "read", lambda self: diary.append("waited") or read(self))
    hooks = Hooks(after_backward=[lambda *_: diary.append("passes")])
    traval, *_ = watched(*BATCHES.split(), "--print-freq", "100", "--save-every-steps", "6", model=Net(), hooks=hooks)
    traval.train(0)
    first = ["passes", "launched", "waited"]  # which is logged
    to_a_save = ["passes", "launched", *4 * ["passes", "waited", "launched"], "waited"]
    to_the_end = ["passes", "launched", *5 * ["passes", "waited", "launched"], "waited"]
    assert diary == [*first, *to_a_save, *to_the_end]


class HostReads(TorchDispatchMode):
    """Counts what the host reads of tensors, and so waits for; ``on_host``: tensors that no device holds."""

    def __init__(self, on_host):
        super().__init__()
        self.count = 0
        self.on_host = {tensor.data_ptr() for tensor in on_host}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket.__name__ in ("_local_scalar_dense", "nonzero", "is_nonzero", "equal"):
            self.count += args[0].data_ptr() not in self.on_host
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("precision", ["--amp fp16 --init-scale 64", "--amp off"])
@pytest.mark.parametrize("case", CASES)
def test_a_step_reads_nothing(case, precision, on_device):
    traval, *_ = watched(*f"{BATCHES} {CASES[case]} {precision}".split(), model=Net())
    accumulated = traval.args.optimisation.accumulate
    batches = list(traval.train_loader.batches(0))
    traval.training_step(batches[:accumulated])
    # timm's count steps in tensors of the host, wherever the parameters are
    holders = [values for own in traval.optimizers for values in (*own.param_groups, *own.state.values())]
    counters = [values["step"] for values in holders if isinstance(values.get("step"), torch.Tensor)]
    with HostReads(counters) as reads:
        for step in range(1, 4):
            traval.training_step(batches[step * accumulated : (step + 1) * accumulated])
    assert reads.count == 0
    assert not any(own.reads_flag for own in traval.active)
