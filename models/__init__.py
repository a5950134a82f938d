"""Networks: our own, and timm's and torchvision's by name; ``load_model`` loads the network of a checkpoint."""

from models.build import build_model
from models.load import load_model

__all__ = ["build_model", "load_model"]
