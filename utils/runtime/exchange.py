"""How processes exchange gradients while they train: in which pieces, and in which dtype."""

from __future__ import annotations

from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

from utils.config.groups.exchange import ExchangeSettings


def exchanging(wrapped: nn.parallel.DistributedDataParallel, settings: ExchangeSettings) -> None:
    """Make ``wrapped`` exchange its gradients as the settings say; the size of pieces is fixed when it is made."""
    if settings.grad_compression == "bf16":
        wrapped.register_comm_hook(None, _bf16_hook)


def describe(settings: ExchangeSettings, processes: int) -> str:
    """What ``processes`` exchange; '' for what they usually do."""
    words = []
    if settings.grad_compression != "off":
        words.append(f"gradients in {settings.grad_compression}")
    if settings.bucket_mb is not None:
        words.append(f"gradients in pieces of {settings.bucket_mb} MiB")
    return "; ".join(words) if processes > 1 else ""


def _bf16_hook(state, bucket):  # DDP refuses annotations that are texts, as all are here
    """Torch's own hook under another name: torch refuses its own where it was built without CUDA, though gloo can."""
    return bf16_compress_hook(state, bucket)
