"""Data sets, samplers of training batches, and the LightningDataModule that serves them."""

from fewshot_callbacks.data.data_module import FewShotDataModule
from fewshot_callbacks.data.dataset import FewShotDataset
from fewshot_callbacks.data.samplers import ClassBalanced, ClassBalancedBatchSampler, Episodes, EpisodicBatchSampler
from fewshot_callbacks.system.extras import missing_extra

# Samplers and the data module need no image package, and work without the extra.
try:
    from fewshot_callbacks.data.cub200 import CUB200
    from fewshot_callbacks.data.glyphs import Glyphs, augment_glyphs
    from fewshot_callbacks.data.image_folder import ImageFolder
    from fewshot_callbacks.data.image_set import ImageItem, ImageSet, PhotoTransform
    from fewshot_callbacks.data.logodet3k import LogoCounts, LogoDet3K, LogoTransform
    from fewshot_callbacks.data.mini_imagenet import MiniImageNet
    from fewshot_callbacks.data.omniglot import Omniglot
except ModuleNotFoundError as missing:
    __getattr__ = missing_extra(__name__, "vision", missing)

__all__ = [
    "CUB200",
    "ClassBalanced",
    "ClassBalancedBatchSampler",
    "Episodes",
    "EpisodicBatchSampler",
    "FewShotDataModule",
    "FewShotDataset",
    "Glyphs",
    "ImageFolder",
    "ImageItem",
    "ImageSet",
    "LogoCounts",
    "LogoDet3K",
    "LogoTransform",
    "MiniImageNet",
    "Omniglot",
    "PhotoTransform",
    "augment_glyphs",
]
