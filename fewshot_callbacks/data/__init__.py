"""Episodes, the built-in glyph set and folders of images, as LightningDataModules."""
