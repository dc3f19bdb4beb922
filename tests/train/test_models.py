import pytest
import torch

from train.models import resnet6, resnet32, small


@pytest.mark.parametrize("make", [small, resnet6, resnet32])
@pytest.mark.parametrize(("channels", "size"), [(1, 28), (3, 32), (3, 30)])
def test_one_logit_per_class(make, channels, size):
    network = make(channels, size, 7)
    assert network(torch.zeros(2, channels, size, size)).shape == (2, 7)


def test_resnet32_is_the_one_of_the_paper():
    network = resnet32(3, 32, 10)
    # Table 6 of the paper: 0.46 million; 31 convolutions and a linear layer.
    assert sum(parameter.numel() for parameter in network.parameters()) == 464_154
    weighted = [m for m in network.modules() if isinstance(m, torch.nn.Conv2d | torch.nn.Linear)]
    assert len(weighted) == 32
