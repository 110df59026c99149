"""Episodes, the built-in glyph set and folders of images, as LightningDataModules."""

from fewshot_callbacks.data.episodes import EpisodicBatchSampler
from fewshot_callbacks.data.folders import ImageFolderDataModule, ImageFolderSet
from fewshot_callbacks.data.glyphs import GlyphDataModule, GlyphSet, augment_glyphs, glyph_sheet

__all__ = [
    "EpisodicBatchSampler",
    "GlyphDataModule",
    "GlyphSet",
    "ImageFolderDataModule",
    "ImageFolderSet",
    "augment_glyphs",
    "glyph_sheet",
]
