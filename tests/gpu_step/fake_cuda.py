"""A CUDA device of which only the shapes and dtypes of tensors exist: a process's own steps without a GPU.

``fake_cuda.c`` is a CUDA runtime that does nothing. In a process that begins with it (``environment``),
``torch.cuda.is_available()`` is true, and within ``FakeTensorMode`` forward, backward, autocast, fused optimizers,
``GradScaler``, streams and events run on "cuda" tensors that hold nothing.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


class Unavailable(Exception):
    """This machine cannot build the runtime, for the reason given."""


def environment(folder: Path) -> dict[str, str]:
    """The environment of a process with the runtime, which is built in ``folder``. Raises ``Unavailable``."""
    import torch

    if sys.platform != "linux":
        raise Unavailable("the pretended CUDA runtime is for Linux")
    if torch.version.cuda is None:
        raise Unavailable("torch is built without CUDA")
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise Unavailable("needs a C compiler")
    triton = importlib.util.find_spec("triton")
    headers = triton and Path(triton.origin).parent / "backends" / "nvidia" / "include"
    if not headers or not (headers / "driver_types.h").is_file():
        raise Unavailable("needs the CUDA headers that come with triton")
    library = folder / "libcuda.so.1"  # a driver of that name is looked for as well
    command = [compiler, "-shared", "-fPIC", "-w", f"-I{headers}", "-o", library, HERE / "fake_cuda.c"]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if built.returncode:
        raise Unavailable(f"the pretended CUDA runtime does not compile here: {built.stderr[-300:]}")
    return {**os.environ, "LD_PRELOAD": str(library), "LD_LIBRARY_PATH": str(folder), "CUDA_VISIBLE_DEVICES": "0"}
