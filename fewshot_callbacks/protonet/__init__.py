"""Prototypical networks with their heads and backbones, and a LightningModule for any backbone and embedding loss."""

from fewshot_callbacks.functional.episodes import EpisodeProtocol
from fewshot_callbacks.protonet.backbones import Conv4, make_backbone, resnet18
from fewshot_callbacks.protonet.classifiers import ClassVectors, SupportClassifier
from fewshot_callbacks.protonet.embedding_module import EmbeddingModule
from fewshot_callbacks.protonet.evaluation import evaluate_episodes
from fewshot_callbacks.protonet.heads import (
    Distance,
    DistanceHead,
    DistanceRatioHead,
    Representation,
    SoftmaxHead,
    class_logits,
    make_head,
    prototypes,
    squared_distances,
)
from fewshot_callbacks.protonet.module import ProtoNet

__all__ = [
    "ClassVectors",
    "Conv4",
    "Distance",
    "DistanceHead",
    "DistanceRatioHead",
    "EmbeddingModule",
    "EpisodeProtocol",
    "ProtoNet",
    "Representation",
    "SoftmaxHead",
    "SupportClassifier",
    "class_logits",
    "evaluate_episodes",
    "make_backbone",
    "make_head",
    "prototypes",
    "resnet18",
    "squared_distances",
]
