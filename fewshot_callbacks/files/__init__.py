"""Files on disk: names, texts, images, outputs of this package, and the state of a long evaluation."""
