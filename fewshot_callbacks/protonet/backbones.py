"""Backbones: networks from images to embeddings. `make_backbone` gives a further one its name."""

from typing import Any, Literal, cast, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fewshot_callbacks.errors import InputError
from fewshot_callbacks.system.extras import required_extra
from fewshot_callbacks.system.words import with_article

ConvolutionInit = Literal["pytorch", "he_fan_out"]


class Conv4(nn.Module):
    """Four blocks of 3x3 convolution, batch norm, ReLU and 2x2 max pooling, flattened: the small few-shot backbone.

    Each block halves the image, rounding down. The convolutions have no bias: the batch norm after them would cancel it.
    The ReLU follows the pooling, which gives the same numbers for less work.

    Args:
        in_channels: Channels of the images: 3 for colour, 1 for gray.
        width: Filters of each convolution.
        init: How the 3x3 weights are drawn. `"pytorch"`: uniform, PyTorch's default, with the standard deviation 1 /
            sqrt(3 * 9 * inputs), 0.024 for 64 inputs. `"he_fan_out"`: normal with sqrt(2 / (9 * width)), 0.059 for 64
            filters, as in ResNet and in the programs of Chen et al. and of the distance-ratio paper. Batch norm removes
            the scale from the features, so both begin as equally good networks; but Adam's first steps have the same
            size for both: a learning rate of 1e-3 is 4 % of a weight of the first and 1.7 % of the second.

    Raises:
        ValueError: If `in_channels` or `width` is not positive, or `init` is unknown.

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
            raise InputError(f"width={width}: Conv4 needs at least one filter. Use width >= 1; the usual one is 64.")
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
        """Compute the length of the embedding of an image.

        Args:
            image_size: Side of a square image, or (height, width), in pixels; at least 16.

        Returns:
            `width * (height // 16) * (width // 16)`.

        Raises:
            ValueError: If a side is smaller than 16 pixels.

        Examples:
            >>> Conv4().output_dim((84, 84))
            1600
        """
        if isinstance(image_size, int):
            image_size = (image_size, image_size)
        height, width = image_size
        if min(height, width) < 16:
            raise InputError(
                f"Conv4 halves the image four times; {height}x{width} pixels are too few. Resize the images to 16x16 "
                f"or more."
            )
        return self.width * (height // 16) * (width // 16)

    def forward(self, images: Float[Tensor, "batch channel height width"]) -> Float[Tensor, "batch dim"]:
        """Embed a batch of images.

        Args:
            images: Images of at least 16x16 pixels.

        Returns:
            One embedding of `output_dim((height, width))` numbers per image.

        Raises:
            ValueError: If a side is smaller than 16 pixels, or the number of channels is not `in_channels`.
        """
        _, channels, height, width = images.shape
        if channels != self.in_channels:
            raise InputError(
                f"Conv4(in_channels={self.in_channels}) was given images of {channels} "
                f"{'channel' if channels == 1 else 'channels'}, shape {tuple(images.shape)}. Use in_channels={channels}, "
                "or convert the images."
            )
        self.output_dim((height, width))  # refuses images that would vanish
        if images.device.type == "cpu":
            # On CPUs, convolutions are faster with the channels last in memory: benchmarks/episodes.py.
            images = images.to(memory_format=torch.channels_last)
        features: Tensor = self.blocks(images)  # (batch, width, height // 16, width // 16)
        return features.flatten(start_dim=1)  # (batch, dim)


def resnet18(in_channels: int = 3) -> nn.Module:
    """Build torchvision's ResNet-18 without its classifier, randomly initialised.

    Args:
        in_channels: Channels of the images; for other than 3 the first convolution is replaced, and initialised in
            the same way.

    Returns:
        A module that maps images (batch, in_channels, height, width) to embeddings (batch, 512) for every image size;
        224x224 is usual.

    Raises:
        ValueError: If `in_channels` is not positive.

    References:
        He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition", CVPR 2016.

    Examples:
        >>> import torch
        >>> resnet18(in_channels=1).eval()(torch.zeros(2, 1, 32, 32)).shape
        torch.Size([2, 512])
    """
    with required_extra("vision", "resnet18"):
        from torchvision import models  # noqa: PLC0415 - slow to import, and needed by this backbone alone

    _check_channels(in_channels)
    network = cast(nn.Module, models.resnet18(weights=None))
    # The embeddings are the inputs of the removed classifier.
    network.fc = nn.Identity()
    if in_channels != 3:
        network.conv1 = nn.Conv2d(in_channels, 64, kernel_size=7, stride=2, padding=3, bias=False)
        _draw_he_fan_out(network.conv1)
    return network


def make_backbone(backbone: str | nn.Module, in_channels: int = 3) -> nn.Module:
    """Build a backbone from its name, or pass a module through.

    Args:
        backbone: `"conv4"` (`Conv4`), `"resnet18"` (`resnet18`), or any module that maps a batch of
            inputs to embeddings (batch, dim).
        in_channels: Channels of the images; has no effect on a module.

    Returns:
        The backbone.

    Raises:
        ValueError: If the name is unknown, or `in_channels` is not positive.

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
    """Return embeddings, one for each image; refuse anything else.

    Raises:
        ValueError: The output is invalid; the message has its shape or type.
    """
    if isinstance(embeddings, Tensor) and embeddings.ndim == 2 and len(embeddings) == images:
        return embeddings
    is_tensor = isinstance(embeddings, Tensor)
    output = f"shape {tuple(embeddings.shape)}" if is_tensor else with_article(type(embeddings).__name__)
    raise InputError(
        f"{call}: {type(backbone).__name__} gave {output} for {images} images; one vector per image is needed, (images, "
        "dim). End the backbone with nn.Flatten() or a pooling."
    )


def _conv_block(in_channels: int, out_channels: int, init: ConvolutionInit) -> nn.Sequential:
    convolution = nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1, bias=False)
    if init == "he_fan_out":
        _draw_he_fan_out(convolution)
    return nn.Sequential(
        convolution,
        nn.BatchNorm2d(out_channels),
        nn.MaxPool2d(kernel_size=2),
        # The ReLU commutes with the maximum, and after the maximum it only has a quarter of the work, also in the
        # backward pass.
        nn.ReLU(inplace=True),
    )


def _draw_he_fan_out(convolution: nn.Conv2d) -> None:
    """Draw the weights with the standard deviation sqrt(2 / (kernel size * filters))."""
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")


def _check_channels(in_channels: int) -> None:
    if in_channels < 1:
        raise InputError(f"in_channels={in_channels}: images have at least one channel. Use 3 for colour, 1 for gray.")
