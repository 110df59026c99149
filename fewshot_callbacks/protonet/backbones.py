"""Backbones: networks from images to embeddings. To add a backbone with a name, extend `make_backbone`."""

from typing import Any, Literal, cast, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fewshot_callbacks.errors import InputError
from fewshot_callbacks.system.extras import required_extra
from fewshot_callbacks.system.words import with_article

ConvolutionInit = Literal["pytorch", "he_fan_out"]


class Conv4(nn.Module):
    """The small backbone of few-shot papers: four convolutional blocks, then the features are flattened.

    A block is a 3x3 convolution, batch norm, ReLU and 2x2 max pooling. Each block halves the image, rounding down. The
    convolutions have no bias, because batch norm would cancel it. The ReLU comes after the pooling, which computes the same
    numbers with less work.

    Args:
        in_channels: Channels of the images: 3 for colour, 1 for grey.
        width: Filters of each convolution.
        init: Initialisation of the convolutions.

            - `"pytorch"`: PyTorch's default, uniform with standard deviation 1 / sqrt(3 * 9 * inputs), which is 0.024 for 64
              inputs.
            - `"he_fan_out"`: normal with standard deviation sqrt(2 / (9 * width)), which is 0.059 for 64 filters. ResNet and
              the code of Chen et al. and of the distance-ratio paper use it.

            Batch norm removes the scale of the weights from the features, so both start with equally good features. Adam's
            first steps are relatively larger for `"pytorch"`: a learning rate of 1e-3 is 4 % of a typical weight, and 1.7 %
            for `"he_fan_out"`.

    Raises:
        ValueError: `in_channels` or `width` is not positive, or `init` is unknown.

    References:
        Snell, Swersky, Zemel, "Prototypical Networks for Few-shot Learning", NeurIPS 2017.
        He, Zhang, Ren, Sun, "Delving Deep into Rectifiers", ICCV 2015: the normal draw.
        Chen, Liu, Kira, Wang, Huang, "A Closer Look at Few-shot Classification", ICLR 2019.

    Examples:
        >>> import torch
        >>> Conv4()(torch.zeros(2, 3, 84, 84)).shape
        torch.Size([2, 1600])
        >>> Conv4(in_channels=1).output_dim(32)
        256
    """

    def __init__(self, in_channels: int = 3, width: int = 64, *, init: ConvolutionInit = "pytorch") -> None:
        super().__init__()
        _check_channels(in_channels)
        if width < 1:
            raise InputError(
                f"Conv4(width={width}): a convolution needs at least one filter. Use width >= 1, usually 64."
            )
        if init not in get_args(ConvolutionInit):
            raise InputError(f"Conv4: there is no init={init!r}. Choose 'pytorch' or 'he_fan_out'.")
        self.in_channels = in_channels
        self.width = width
        self.blocks = nn.Sequential(
            _conv_block(in_channels, width, init),
            _conv_block(width, width, init),
            _conv_block(width, width, init),
            _conv_block(width, width, init),
        )

    def output_dim(self, image_size: int | tuple[int, int]) -> int:
        """Return the dimension of an image's embedding: filters * (height // 16) * (width // 16).

        Args:
            image_size: Side of a square image, or (height, width), in pixels; at least 16.

        Raises:
            ValueError: A side is smaller than 16 pixels.

        Examples:
            >>> Conv4().output_dim((84, 84))
            1600
        """
        if isinstance(image_size, int):
            image_size = (image_size, image_size)
        height, width = image_size
        if min(height, width) < 16:
            raise InputError(
                f"Conv4 halves an image four times, so {height}x{width} pixels are too few. Resize the images to 16x16 or "
                f"more."
            )
        return self.width * (height // 16) * (width // 16)

    def forward(self, images: Float[Tensor, "batch channel height width"]) -> Float[Tensor, "batch dim"]:
        """Return the embeddings of a batch of images, with `output_dim((height, width))` dimensions.

        Args:
            images: Images of at least 16x16 pixels.

        Raises:
            ValueError: A side is smaller than 16 pixels, or the number of channels is not `in_channels`.
        """
        _, channels, height, width = images.shape
        if channels != self.in_channels:
            raise InputError(
                f"Conv4(in_channels={self.in_channels}): the images have {channels} "
                f"{'channel' if channels == 1 else 'channels'}, shape {tuple(images.shape)}. Use in_channels={channels}, "
                "or convert the images."
            )
        self.output_dim((height, width))  # raises an error for too small images
        if images.device.type == "cpu":
            # Convolutions on CPUs are faster in channels-last memory format: benchmarks/episodes.py.
            images = images.to(memory_format=torch.channels_last)
        features: Tensor = self.blocks(images)  # (batch, width, height // 16, width // 16)
        return features.flatten(start_dim=1)  # (batch, dim)


def resnet18(in_channels: int = 3) -> nn.Module:
    """Return torchvision's ResNet-18 without its classifier, randomly initialised.

    The network maps images (batch, in_channels, height, width) to embeddings (batch, 512), for any image size; 224x224 is
    usual.

    Args:
        in_channels: Channels of the images. If it is not 3, the first convolution is replaced, with the same initialisation.

    Raises:
        ValueError: `in_channels` is not positive.

    References:
        He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition", CVPR 2016.

    Examples:
        >>> import torch
        >>> resnet18(in_channels=1).eval()(torch.zeros(2, 1, 32, 32)).shape
        torch.Size([2, 512])
    """
    with required_extra("vision", "resnet18"):
        from torchvision import models  # noqa: PLC0415 - slow to import, and only this backbone needs it

    _check_channels(in_channels)
    network = cast(nn.Module, models.resnet18(weights=None))
    # The embeddings are the inputs of the removed classifier.
    network.fc = nn.Identity()
    if in_channels != 3:
        network.conv1 = nn.Conv2d(in_channels, 64, kernel_size=7, stride=2, padding=3, bias=False)
        _draw_he_fan_out(network.conv1)
    return network


def make_backbone(backbone: str | nn.Module, in_channels: int = 3) -> nn.Module:
    """Return the backbone with this name; a module is returned unchanged.

    Args:
        backbone: `"conv4"` (`Conv4`), `"resnet18"` (`resnet18`), or any module that maps a batch of inputs to embeddings
            (batch, dim).
        in_channels: Channels of the images; it has no effect on a module.

    Raises:
        ValueError: The name is unknown, or `in_channels` is not positive.

    Examples:
        >>> type(make_backbone("conv4", in_channels=1)).__name__
        'Conv4'
    """
    if isinstance(backbone, nn.Module):
        return backbone
    if backbone == "conv4":
        return Conv4(in_channels)
    if backbone == "resnet18":
        return resnet18(in_channels)
    raise InputError(
        f"There is no backbone {backbone!r}. Choose 'conv4' or 'resnet18', or pass an nn.Module images -> embeddings."
    )


def checked_embeddings(embeddings: Any, backbone: nn.Module, images: int, call: str) -> Tensor:
    """Return the embeddings if they are a tensor (images, dim)."""
    if isinstance(embeddings, Tensor) and embeddings.ndim == 2 and len(embeddings) == images:
        return embeddings
    is_tensor = isinstance(embeddings, Tensor)
    output = f"shape {tuple(embeddings.shape)}" if is_tensor else with_article(type(embeddings).__name__)
    raise InputError(
        f"{call}: {type(backbone).__name__} returned {output} for {images} images, but the output must be (images, dim). "
        "End the backbone with nn.Flatten() or a pooling layer."
    )


def _conv_block(in_channels: int, out_channels: int, init: ConvolutionInit) -> nn.Sequential:
    convolution = nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1, bias=False)
    if init == "he_fan_out":
        _draw_he_fan_out(convolution)
    return nn.Sequential(
        convolution,
        nn.BatchNorm2d(out_channels),
        nn.MaxPool2d(kernel_size=2),
        # ReLU and maximum commute; after the maximum, ReLU has a quarter of the work, also in the backward pass.
        nn.ReLU(inplace=True),
    )


def _draw_he_fan_out(convolution: nn.Conv2d) -> None:
    """Draw the weights from a normal distribution with standard deviation sqrt(2 / (kernel size * filters))."""
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")


def _check_channels(in_channels: int) -> None:
    if in_channels < 1:
        raise InputError(f"in_channels={in_channels}: images have at least one channel. Use 3 for colour, 1 for grey.")
