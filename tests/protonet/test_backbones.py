"""Backbones: their shapes, their initial weights, and names that build them."""

import math

import pytest
import torch
from torch import nn

from fewshot_callbacks.protonet import Conv4, make_backbone, resnet18


@pytest.mark.parametrize(("channels", "size", "dim"), [(3, (84, 84), 1600), (1, (31, 47), 128)])
def test_conv4_output_dimension(channels: int, size: tuple[int, int], dim: int) -> None:
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


@pytest.mark.parametrize(("init", "width"), [("pytorch", 64), ("he_fan_out", 64), ("he_fan_out", 128)])
def test_conv4_starts_with_the_standard_deviation_of_its_initialisation(init: str, width: int) -> None:
    convolutions = [block[0] for block in Conv4(1, width, init=init).blocks]
    for convolution, inputs in zip(convolutions, (1, width, width, width), strict=True):
        # the bounds of PyTorch's uniform draw are +-1 / sqrt(k^2 in), so its variance is a third of 1 / (k^2 in)
        variance = 1 / (3 * 9 * inputs) if init == "pytorch" else 2 / (9 * width)
        weights = convolution.weight.detach().double()
        # the standard error of a standard deviation is at most s / sqrt(2 n) for a normal and less for a uniform draw
        assert weights.std().item() == pytest.approx(math.sqrt(variance), rel=5 / math.sqrt(2 * weights.numel()))
        assert abs(weights.mean().item()) < 5 * math.sqrt(variance / weights.numel())
        is_normal = (weights.abs() > 2 * math.sqrt(variance)).any().item()  # a uniform draw ends at 1.73 deviations
        assert is_normal == (init == "he_fan_out")


def test_conv4_starts_by_default_as_pytorch_does() -> None:
    expected = nn.Conv2d(3, 64, kernel_size=3, bias=False).weight
    for build in (Conv4, lambda: make_backbone("conv4")):
        torch.manual_seed(0)
        assert torch.equal(build().blocks[0][0].weight, expected)


@pytest.mark.parametrize(
    ("refused", "words"),
    [
        (lambda: Conv4()(torch.randn(1, 3, 15, 40)), r"halves the image four times; 15x40 pixels .* Resize .* 16x16"),
        (lambda: Conv4().output_dim(8), "8x8 pixels are too few"),
        (lambda: Conv4()(torch.randn(1, 1, 32, 32)), r"in_channels=3\) was given .* 1 channels, .* Use in_channels=1"),
        (lambda: Conv4(0), "in_channels=0: images have at least one channel"),
        (lambda: Conv4(width=0), "width=0: Conv4 needs at least one filter"),
        (lambda: Conv4(init="xavier"), r"Conv4: there is no init='xavier'\. Choose 'pytorch' or 'he_fan_out'\."),
        (lambda: make_backbone("resnet18", in_channels=0), "in_channels=0"),
        (lambda: make_backbone("vgg"), r"no backbone 'vgg'. Choose 'conv4' or 'resnet18', or pass an nn.Mod"),
    ],
)
def test_what_cannot_be_built_or_embedded_is_refused(as_users_run_it: None, refused, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        refused()


@pytest.mark.parametrize("channels", [1, 3])
def test_resnet18_gives_512_numbers(channels: int) -> None:
    backbone = resnet18(channels).eval()
    with torch.no_grad():
        assert [backbone(torch.randn(2, channels, side, side)).shape for side in (32, 56)] == [(2, 512)] * 2
    assert not any(isinstance(layer, nn.Linear) for layer in backbone.modules())
    # the first convolution is drawn with the deviation sqrt(2 / (kernel size * filters)), whatever it takes in
    assert backbone.conv1.weight.std().item() == pytest.approx(math.sqrt(2 / (49 * 64)), rel=0.1)


def test_backbones_by_name() -> None:
    module = nn.Flatten()
    assert isinstance(make_backbone("conv4", in_channels=1), Conv4)
    assert type(make_backbone("resnet18", in_channels=1)).__name__ == "ResNet"
    assert make_backbone(module) is module
