"""Operations and host reads of a recipe's training steps and validation, counted on fake CUDA tensors.

``counts`` gives those of recipes, from a process of their own. Their table, ``launches.json``, may only fall:
python -m tests.gpu_step.counting counts all recipes and writes what has fallen into it.
"""

import itertools
import json
import signal
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

from scripts.common.recipes import recipes
from tests.gpu_step.fake_cuda import Unavailable, environment
from utils.config.arguments import parse
from utils.config.datasets import SPECS

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_name("launches.json")
TORCH = torch.__version__.rsplit(".", 1)[0]  # another version takes other operations for the same network
STEPS = 2  # the first one makes an optimizer's state
# They launch nothing: views, and memory that is only taken.
NO_LAUNCH = {
    "_pin_memory", "_reshape_alias", "_unsafe_view", "alias", "as_strided", "detach", "device", "diagonal", "empty",
    "empty_like", "empty_strided", "expand", "flatten", "is_pinned", "lift_fresh", "new_empty", "new_empty_strided",
    "permute", "record_stream", "reshape", "select", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose",
    "unbind", "unfold", "unsqueeze", "view",
}  # fmt: skip
READS = {"_local_scalar_dense", "is_nonzero", "nonzero", "equal", "_unique2", "unique_dim", "masked_select"}


class Counted(TorchDispatchMode):
    """Counts ``operations``, a launch or more each, and ``reads`` by place: what makes the host wait for the device.

    Copies to the device from memory that is not pinned are among the reads, but torch does not show those of
    ``torch.tensor(..., device=...)``. ``copies``: copies to the host that it does not wait for.
    """

    def __init__(self):
        super().__init__()
        self.operations = Counter()
        self.reads = Counter()
        self.copies = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = function.overloadpacket.__name__
        if name in READS and on_device(args[0]):
            self.reads[place()] += 1
            if name == "_local_scalar_dense":
                return args[0].dtype.is_floating_point and 0.0  # finite, and no skipped step
        if name in ("_to_copy", "copy_") and function.namespace == "aten":
            source, target = (args[1], args[0].device) if name == "copy_" else (args[0], kwargs.get("device"))
            towards = target is not None and torch.device(target).type
            waits = not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
            if on_device(source) and towards == "cpu":
                self.reads[place()] += waits
                self.copies += not waits
            if towards == "cuda" and not on_device(source):  # from memory that is not pinned
                self.reads[place()] += waits
        if function.namespace not in ("profiler", "prim") and name not in NO_LAUNCH and touches_device(args, kwargs):
            self.operations[name] += 1
        if name == "nonzero" and on_device(args[0]):  # fake tensors do not know how many there are
            return args[0].new_zeros((1, args[0].ndim), dtype=torch.int64)
        return function(*args, **kwargs)

    @property
    def total(self) -> int:
        return sum(self.operations.values())


def on_device(tensor) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.device.type == "cuda"


def touches_device(args, kwargs) -> bool:
    """Whether the operation works on the device, or makes a tensor there."""
    flat = itertools.chain(*(arg if isinstance(arg, list | tuple) else (arg,) for arg in (*args, *kwargs.values())))
    return any(map(on_device, flat)) or torch.device(kwargs.get("device") or "cpu").type == "cuda"


def place() -> str:
    """The innermost line of the product that is being executed."""
    frames = [f for f in traceback.extract_stack() if f.filename.startswith((f"{ROOT}/utils", f"{ROOT}/models"))]
    return f"{Path(frames[-1].filename).relative_to(ROOT)}: {frames[-1].line}" if frames else "elsewhere"


@contextmanager
def pretended():
    """Fake CUDA tensors, and what they lack: a read of a whole tensor is one read, and pinned memory is memory."""

    def zeros(self):
        if self.device.type == "cuda":
            self.flatten()[:1].sum().item()
        return np.zeros(tuple(self.shape), dtype=str(self.dtype).removeprefix("torch."))

    def as_list(self, give=torch.Tensor.tolist):
        return zeros(self).tolist() if isinstance(self, FakeTensor) else give(self)

    def as_array(self, give=torch.Tensor.numpy):
        return zeros(self) if isinstance(self, FakeTensor) else give(self)

    def moved(self, **kwargs):
        for module in self.modules():
            for name, own in module._buffers.items():
                module._buffers[name] = own if own is None else own.to(device=kwargs.get("device"))
            for name, own in module._parameters.items():
                if own is not None and ("memory_format" not in kwargs or own.ndim == 4):
                    module._parameters[name] = nn.Parameter(own.detach().to(**kwargs), own.requires_grad)
        return self

    def copied(self, memo):
        if id(self) not in memo:
            copy = self.detach().clone()
            memo[id(self)] = nn.Parameter(copy, self.requires_grad) if isinstance(self, nn.Parameter) else copy
        return memo[id(self)]

    with (
        mock.patch.object(nn.Module, "to", moved),
        mock.patch.object(torch.Tensor, "__deepcopy__", copied),
        mock.patch.object(FakeTensor, "tolist", as_list),
        mock.patch.object(torch.Tensor, "numpy", as_array),
        mock.patch.object(torch.Tensor, "pin_memory", lambda self, *_: self),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        yield


def build(*flags: str):
    """A ``TraVal`` for these flags on the pretended device, with a recipe's network, optimizer and loaders."""
    from models import build_model
    from models.prepare import to_memory_format
    from utils.data.datasets import get_data
    from utils.data.loaders import loaders
    from utils.loop.extras import Extras
    from utils.optim.build import build_optimizer_parts
    from utils.optim.criterion import build_criterion
    from utils.optim.freezing import build_freezing
    from utils.optim.lr_policy import LRPolicy
    from utils.precision.amp import keep_in_fp32
    from utils.runtime.distributed import Distributed, RankInfo
    from utils.train_validation import TraVal

    args = parse(["--device", "cuda", "--dataname", "synthetic", *flags])
    distributed = Distributed(RankInfo(), args.run, args.precision.tf32)
    data = get_data(args.data, distributed.device)
    shape = {"classes": len(data.classes), "channels": data.spec.channels, "image_size": data.image_size}
    with unset_fake_temporarily():  # to build a network the host reads numbers, such as the rates of dropped paths
        model = build_model(args.model, **shape)
    model.to(device=distributed.device)
    channels_last = to_memory_format(args, model, distributed.device)
    freezing = build_freezing(args.model, model)
    keep_in_fp32(model, args.precision.fp32_layers or (), distributed.device)
    train_loader, validation_loader, _ = loaders(data, args, distributed, channels_last=channels_last)
    parts = build_optimizer_parts(args, model, freezing, distributed)
    extras = Extras(
        distributed=distributed,
        ema=parts.ema,
        freezing=freezing,
        lr_policy=LRPolicy(args.optimisation, train_loader.steps_per_epoch, args.average),
    )
    criterion = build_criterion(args.loss)
    return TraVal(
        model, train_loader, parts.optimizers, criterion, parts.scaler, args, validation_loader, extras=extras
    )


def count_steps(traval) -> dict[str, int | dict[str, int]]:
    """Counts of a step: ``passes``, forward and backward; ``rest`` of the step; ``loader``, of all steps' batches.

    ``reads``, within step and loader, with their places in ``where``.
    """
    passes = 0
    loader = 0
    begun = []
    reads = Counter()
    traval.network.train()
    traval.consensus.begin()
    traval.reporter.begin_epoch(traval.progress, traval.train_loader.steps_per_epoch)
    steps = itertools.groupby(traval._batches(0), key=lambda batch: batch.number)
    for _ in range(STEPS):
        with Counted() as loading:
            batches = list(next(steps)[1])
        loader += loading.total
        with Counted() as step:
            ends = []
            traval.hooks.before_forward[:] = [lambda *_, step=step, begun=begun: begun.append(step.total)]
            traval.hooks.after_backward[:] = [lambda *_, step=step, ends=ends: ends.append(step.total)]
            begun.clear()
            traval.training_step(batches)
        passes = sum(ends) - sum(begun)
        reads = step.reads + loading.reads
    return {
        "passes": passes,
        "rest": step.total - passes,
        "loader": loader,
        "reads": sum(reads.values()),
        "where": dict(reads),
    }


def count_validation(traval) -> dict[str, int | dict[str, int]]:
    """Counts of a validation: ``batches``, all ``operations``, and reads as in ``count_steps``."""
    with Counted() as counted:
        traval.validation(0, report=False)
    return {
        "batches": len(traval.validation_loader),
        "operations": counted.total,
        "reads": sum(counted.reads.values()),
        "where": dict(counted.reads),
    }


def count(recipe: str) -> dict[str, dict]:
    """Counts of a recipe's step and validation; images of one's own have 224 pixels."""
    if "/" not in recipe:
        flags = ["--config", recipe, "--image-size", "224", "--no-pretrained"]
    else:
        data = parse(["--config", recipe, "--datapath", "anywhere"]).data
        flags = ["--config", recipe, "--image-size", str(data.image_size or SPECS[data.dataname].image_size)]
    with pretended():
        traval = build(*flags)
        return {"step": count_steps(traval), "validation": count_validation(traval)}


def counts(recipes: list[str]) -> dict[str, dict]:
    """Counts of ``recipes``, from a process that begins with the pretended runtime. Raises ``Unavailable``."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.gpu_step.counting", *recipes]
        own = environment(Path(folder)) | {"OMP_NUM_THREADS": "1"}
        run = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True, check=False)
    if run.returncode == -signal.SIGSEGV and TORCH not in json.loads(TABLE.read_text())["torch"]:
        raise Unavailable(f"torch {TORCH} wants more of a CUDA runtime than the pretended one has")
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout)


def figures(counted: dict[str, dict]) -> dict[str, int]:
    """What the table holds of a recipe's counts."""
    step, validation = counted["step"], counted["validation"]
    of_step = {name: step[name] for name in ("passes", "rest", "loader", "reads")}
    return of_step | {f"validation_{name}": validation[name] for name in ("operations", "reads")}


def write_table() -> None:
    """Lower what has fallen, and add what is new; with a version of torch that the table does not know, write it anew."""
    table = json.loads(TABLE.read_text())
    known = table["torch"] if TORCH in table["torch"] else [TORCH]
    old = table["recipes"] if TORCH in table["torch"] else {}
    new = {name: figures(counted) for name, counted in counts([recipe.name for recipe in recipes()]).items()}
    for name, own in new.items():
        new[name] = {key: min(value, old.get(name, {}).get(key, value)) for key, value in own.items()}
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(own)}" for name, own in sorted(new.items()))
    TABLE.write_text(f'{{"torch": {json.dumps(known)}, "recipes": {{\n{lines}\n}}}}\n')


if __name__ == "__main__":
    if len(sys.argv) > 1:
        torch.set_num_threads(1)
        count("digits/fc")  # what a process makes once, for its first recipe, is part of no step
        print(json.dumps({name: count(name) for name in sys.argv[1:]}))
    else:
        write_table()
