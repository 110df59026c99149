"""Files on the disk: their names, texts, images, what this package writes, the state of a long evaluation."""
