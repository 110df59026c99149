"""Backbones: their shapes, their initial weights, and names that build them."""

import math

import pytest
import torch
from torch import nn

from fewshot_callbacks.protonet import Conv4, make_backbone


@pytest.mark.parametrize(("channels", "size", "dim"), [(3, (84, 84), 1600), (1, (16, 47), 128)])
def test_the_output_of_conv4_has_the_dimension_that_output_dim_computes(
    channels: int, size: tuple[int, int], dim: int
) -> None:
    backbone = Conv4(channels).eval()
    assert backbone(torch.randn(2, channels, *size)).shape == (2, dim)
    assert backbone.output_dim(size) == dim


def test_conv4_equals_its_layers_written_out() -> None:
    backbone, images = Conv4(in_channels=1, width=4).train(), torch.randn(5, 1, 20, 18)
    expected = images
    for conv, norm in ((block[0], block[1]) for block in backbone.blocks):
        expected = nn.functional.conv2d(expected, conv.weight, padding=1)
        mean, var = expected.mean((0, 2, 3), keepdim=True), expected.var((0, 2, 3), correction=0, keepdim=True)
        expected = (expected - mean) / (var + norm.eps).sqrt()
        expected = nn.functional.max_pool2d(expected.clamp(min=0), 2)
    torch.testing.assert_close(backbone(images), expected.reshape(5, -1), rtol=1e-4, atol=1e-4)


def test_conv4_starts_by_default_as_pytorch_does() -> None:
    expected = nn.Conv2d(1, 64, kernel_size=3, bias=False).weight
    torch.manual_seed(0)
    assert torch.equal(make_backbone("conv4", in_channels=1).blocks[0][0].weight, expected)


@pytest.mark.parametrize("width", [64, 128])
def test_conv4_starts_with_the_standard_deviation_of_its_initialisation(width: int) -> None:
    for block in Conv4(1, width, init="he_fan_out").blocks:
        weights, deviation = block[0].weight.detach().double(), math.sqrt(2 / (9 * width))
        # the standard error of a standard deviation is s / sqrt(2 n) for a normal draw
        assert weights.std().item() == pytest.approx(deviation, rel=5 / math.sqrt(2 * weights.numel()))
        assert abs(weights.mean().item()) < 5 * deviation / math.sqrt(weights.numel())
        assert (weights.abs() > 2 * deviation).any()  # a uniform draw ends at 1.73 deviations


@pytest.mark.parametrize("channels", [1, 3])
def test_resnet18_gives_512_numbers(channels: int) -> None:
    backbone = make_backbone("resnet18", channels).eval()
    with torch.no_grad():
        assert [backbone(torch.randn(2, channels, side, side)).shape for side in (32, 56)] == [(2, 512)] * 2
    # the first convolution is drawn with the deviation sqrt(2 / (kernel size * filters)), whatever it takes in
    assert backbone.conv1.weight.std().item() == pytest.approx(math.sqrt(2 / (49 * 64)), rel=0.1)
