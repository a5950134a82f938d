"""The choice of the device, with a stand-in for ``torch.accelerator``, and what is asked of devices."""

from unittest.mock import Mock

import pytest
import torch

from utils.config.groups.run import ACCELERATORS
from utils.config.settings import RunSettings, UserError
from utils.record.metrics import ClassificationMeter, ValidationMeter
from utils.runtime import devices
from utils.runtime.distributed import _choose_device
from utils.runtime.process import RankInfo


@pytest.fixture
def machine(monkeypatch):
    """Pretend that this machine has ``count`` accelerators of a kind."""

    def pretend(kind, count=1):
        found = torch.device(kind) if kind else None
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: found)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)

    return pretend


def chosen(device="auto", rank=0, processes=1, **settings):
    return _choose_device(RunSettings(device=device, **settings), RankInfo(rank, processes, rank, processes))


@pytest.mark.parametrize("kind", ACCELERATORS)
def test_auto_takes_the_accelerator_and_its_name_asks_for_it(machine, kind):
    machine(kind, 2)
    assert chosen() == chosen(kind) == torch.device(kind, 0)
    assert chosen(rank=1, processes=2) == torch.device(kind, 1)
    assert chosen(gpu_ids=(1,)) == torch.device(kind, 1)
    assert chosen("cpu") == torch.device("cpu")


@pytest.mark.parametrize("kind", [None, "mtia", "privateuseone"])
def test_auto_takes_the_cpu_without_an_accelerator_that_a_run_can_use(machine, kind):
    machine(kind)
    assert chosen() == torch.device("cpu")
    for asked in ACCELERATORS:
        with pytest.raises(UserError, match=f"--device {asked}: torch .* sees no GPU here; use --device cpu"):
            chosen(asked)
    with pytest.raises(UserError, match="--gpu-ids: torch .* sees no GPU here"):
        chosen(gpu_ids=(0,))


def test_another_kind_than_the_machine_s_is_refused_with_what_there_is(machine):
    machine("mps")
    with pytest.raises(UserError, match="--device cuda: torch .* sees no such GPU here; use --device mps or cpu"):
        chosen("cuda")
    with pytest.raises(UserError, match=r"2 processes but 1 GPU\(s\)"):
        chosen(processes=2)
    with pytest.raises(UserError, match=r"environment: LOCAL_RANK is 2, and this process sees 1 GPU\(s\)"):
        _choose_device(RunSettings(), RankInfo(rank=2, world_size=4, local_rank=2))


def test_only_cuda_runs_ahead_and_only_apple_s_gpus_sum_on_the_host():
    assert [devices.runs_ahead(torch.device(kind)) for kind in ("cpu", *ACCELERATORS)] == [False, True, False, False]
    hosts = [devices.exact_device(torch.device(kind, 0)).type for kind in ACCELERATORS]
    assert hosts == ["cuda", "cpu", "xpu"]


def test_fp16_is_the_default_where_autocast_and_the_scaler_s_kernel_are(monkeypatch):
    assert devices.scales_losses(torch.device("cuda"))
    assert not devices.scales_losses(torch.device("cpu"))
    meta = torch.device("meta")  # a device of neither kind
    assert not devices.scales_losses(meta)
    monkeypatch.setattr(torch.amp, "is_autocast_available", lambda kind: True)
    assert devices.scales_losses(meta)

    lacking = Mock(side_effect=NotImplementedError("no kernel"))
    monkeypatch.setattr(torch, "_amp_foreach_non_finite_check_and_unscale_", lacking)
    assert not devices.scales_losses(meta)


@pytest.mark.parametrize("meter", [ClassificationMeter, ValidationMeter])
def test_meters_of_a_device_without_float64_are_on_the_host(meter):
    assert meter(2, torch.device("mps", 0)).sums.device.type == "cpu"


def test_what_goes_to_a_device_without_float64_is_float32_there(monkeypatch):
    monkeypatch.setattr(devices, "exact_device", lambda device: torch.device("cpu"))
    moved = devices.to_device(torch.ones(2, dtype=torch.float64), torch.device("meta"))
    assert moved.dtype == torch.float32
