"""Episodes, class-balanced batches, the glyphs, image folders and published sets, as LightningDataModules."""

from fewshot_callbacks.data.class_balanced import ClassBalancedBatchSampler
from fewshot_callbacks.data.cub import CUBDataModule
from fewshot_callbacks.data.episodes import EpisodicBatchSampler
from fewshot_callbacks.data.folders import ImageFolderDataModule, ImageFolderSet
from fewshot_callbacks.data.glyphs import GlyphDataModule, GlyphSet, augment_glyphs, glyph_sheet
from fewshot_callbacks.data.logodet3k import LogoCounts, LogoDet3KDataModule
from fewshot_callbacks.data.mini_imagenet import MiniImageNetDataModule
from fewshot_callbacks.data.omniglot import OmniglotDataModule

__all__ = [
    "CUBDataModule",
    "ClassBalancedBatchSampler",
    "EpisodicBatchSampler",
    "GlyphDataModule",
    "GlyphSet",
    "ImageFolderDataModule",
    "ImageFolderSet",
    "LogoCounts",
    "LogoDet3KDataModule",
    "MiniImageNetDataModule",
    "OmniglotDataModule",
    "augment_glyphs",
    "glyph_sheet",
]
