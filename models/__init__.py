"""Networks: own ones, and timm's and torchvision's by name."""

from models.build import build_model, check_forward, unknown_arch

__all__ = ["build_model", "check_forward", "unknown_arch"]
