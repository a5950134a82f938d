"""Networks whose parameters are spread over the processes: torch's ``fully_shard`` (FSDP2).

Zhao et al., PyTorch FSDP: experiences on scaling fully sharded data parallel, 2023. Each process keeps a part of each
parameter, gradient, average and optimizer state; a unit's whole parameters exist while it computes.

Weights arrive in the format that autocast computes with. Autocast would otherwise keep a copy of each whole weight for
the backward pass, and nothing would be saved. Layers of vectors alone (norms, timm's LayerScale) and what lies outside
of the units arrive in float32, as autocast leaves them, and gradients are summed in float32: the results are those of
autocast with whole parameters, except for rounding. Other weights that autocast would leave as they are (ConvNeXt's
gamma, tables of position biases) are rounded, too: all weights of a unit arrive in one format.
"""

from __future__ import annotations

import copy

import torch
from torch import nn

from utils.config.settings import UserError

SMALLEST_UNIT = 200  # a unit has at least one 200th of the network's parameters
_MARK = "spread_over_processes"


def is_sharded(model: nn.Module) -> bool:
    """True if ``spread`` has been called for ``model``."""
    return getattr(model, _MARK, False)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a sharded tensor, in the same memory; any other tensor unchanged."""
    with torch.no_grad():  # otherwise autograd would record the view
        return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@torch.no_grad()
def equalise(model: nn.Module) -> None:
    """Give all processes rank 0's parameters and buffers. All ranks call this."""
    for tensor in (*model.parameters(), *model.buffers()):
        value = tensor.contiguous()
        torch.distributed.broadcast(value, src=0)
        tensor.copy_(value)


def spread(model: nn.Module, device: torch.device, dtype: torch.dtype | None, with_copy: bool) -> nn.Module | None:
    """Spread the parameters of ``model``, which begin as rank 0's, over all processes. All ranks call this.

    Optimizers must be built afterwards. ``device``: this process's; ``dtype``: the format that autocast computes with,
    None without autocast. Returns a copy of ``model``, spread likewise, if ``with_copy``, because a sharded network
    cannot be copied. Raises ``UserError`` if a parameter is used in several places or is a single number.
    """
    shared = len([*model.named_parameters(remove_duplicate=False)]) - len([*model.parameters()])
    if shared:
        raise UserError("--shard-model: the network uses a parameter in several places; remove the flag")
    single = [name for name, parameter in model.named_parameters() if parameter.ndim == 0]
    if single:
        raise UserError(f"--shard-model: torch cannot spread {single[0]}, a single number; remove the flag")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.contiguous()  # others, such as channels-last filters, cannot be spread
    equalise(model)
    twin = copy.deepcopy(model) if with_copy else None
    for network in filter(None, (model, twin)):
        _shard(network, device, dtype)
    return twin


def _shard(model: nn.Module, device: torch.device, dtype: torch.dtype | None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    # Autocast casts what flows between layers, and leaves more of it in float32 than a cast of each unit's inputs.
    full = MixedPrecisionPolicy(cast_forward_inputs=False)
    half = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    vectors = _holders_of_vectors(model) if dtype is not None else []
    of_units = units(model)
    if vectors:
        fully_shard(vectors, mesh=mesh, reshard_after_forward=False, mp_policy=full)
    for unit in of_units:
        fully_shard(unit, mesh=mesh, mp_policy=half if dtype is not None else full)
    fully_shard(model, mesh=mesh, mp_policy=full)
    for module in model.modules():
        if isinstance(module, FSDPModule) and device.type == "cpu":
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no mean
    setattr(model, _MARK, True)


def units(model: nn.Module) -> list[nn.Module]:
    """Blocks of ``model`` whose parameters travel together: the innermost items of its lists that contain layers."""
    least = sum(parameter.numel() for parameter in model.parameters()) / SMALLEST_UNIT
    lists = [module for module in model.modules() if isinstance(module, nn.Sequential | nn.ModuleList)]
    items = dict.fromkeys(
        item
        for module in lists
        for item in module.children()
        if any(True for _ in item.children())
        and not isinstance(item, nn.ModuleList | nn.ModuleDict)
        and sum(parameter.numel() for parameter in item.parameters()) >= least
    )
    return [item for item in items if not any(inner in items for inner in item.modules() if inner is not item)]


def _holders_of_vectors(model: nn.Module) -> list[nn.Module]:
    """Modules inside ``model`` whose parameters are all their own and have at most one dimension: norms, LayerScale."""
    holders = []
    for module in model.modules():
        own = [*module.parameters(recurse=False)]
        if own and len(own) == len([*module.parameters()]) and all(parameter.ndim <= 1 for parameter in own):
            holders.append(module)
    return [module for module in holders if module is not model]


@torch.no_grad()
def idle_pass(model: nn.Module, image_shape: tuple[int, ...], device: torch.device) -> None:
    """Take part, without images, in the other processes' pass of ``model``: they need this process's weights.

    Does nothing unless ``model``, or a network in it, is sharded. To be called inside autocast, like their passes.
    """
    if any(map(is_sharded, model.modules())):
        model(torch.zeros(1, *image_shape, device=device))


def release(model: nn.Module) -> None:
    """Drop whole parameters that a forward pass without a backward pass has left, before their parts change."""
    if not any(map(is_sharded, model.modules())):
        return
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
