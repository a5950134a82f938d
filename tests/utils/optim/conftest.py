"""What holds for all tests of optimizers."""

import pytest
from timm.optim import kron


@pytest.fixture(autouse=True)
def kron_is_not_compiled(monkeypatch):
    """Compiling timm's Kron takes a minute, and tells nothing of what is done with it."""
    monkeypatch.setattr(kron, "has_dynamo", False)
