"""The log loss against PyTorch's."""

import numpy as np
import pytest
import torch
from torch import nn

from emberscale_trainer.models.loss import log_loss


@pytest.mark.parametrize("scale", [0.1, 10.0, 1000.0])
def test_the_log_loss_is_that_of_pytorch(scale: float) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = (scale * torch.randn(100, generator=generator)).requires_grad_()
    labels = torch.randint(2, (100,), generator=generator).float()
    expected = nn.functional.binary_cross_entropy_with_logits(logits, labels)
    expected.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    got = log_loss(logits.detach().numpy(), labels.numpy())
    assert logits.grad is not None
    assert got.total / 100 == pytest.approx(expected.item(), rel=1e-5)
    np.testing.assert_allclose(got.gradient, logits.grad.numpy(), atol=1e-7)
    np.testing.assert_allclose(got.probabilities, torch.sigmoid(logits.detach()).numpy(), atol=1e-6)


def test_what_is_not_finite_stays_so() -> None:
    labels = np.zeros(2, np.float32)
    assert not np.isfinite(log_loss(np.array([np.nan, 0], np.float32), labels).total)
    assert not np.isfinite(log_loss(np.array([np.inf, 0], np.float32), labels).total)


def test_logits_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        log_loss(np.zeros((2, 1), np.float32), np.zeros(2, np.float32))
