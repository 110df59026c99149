"""Prototypical networks: the LightningModule, its heads and its backbones."""
