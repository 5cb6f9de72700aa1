import pytest
import torch

from hetrain.engine.loss import loss_share
from hetrain.errors import ConfigError

LABELS = torch.tensor([1.0, 0.0, 1.0])


@pytest.mark.parametrize(
    ("logits", "shown"),
    [
        (torch.zeros(3, 1, requires_grad=True), r"got \[3, 1\]\."),
        (torch.zeros(2, requires_grad=True), r"got \[2\]\."),
        (torch.zeros(3), r"got \[3\] without a gradient"),
        ((torch.zeros(3, requires_grad=True),), "got a tuple"),
    ],
)
def test_a_forward_that_gives_no_logits_is_named(logits, shown):
    with pytest.raises(ConfigError, match=r"must return logits \[B\] = \[3\].*" + shown):
        loss_share(logits, LABELS, None, 3)
