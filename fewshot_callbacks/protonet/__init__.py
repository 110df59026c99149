"""Prototypical networks: the LightningModule, its heads and its backbones."""

from fewshot_callbacks.protonet.backbones import Conv4, make_backbone, resnet18
from fewshot_callbacks.protonet.evaluation import EpisodeProtocol, evaluate_episodes
from fewshot_callbacks.protonet.heads import DistanceRatioHead, SoftmaxHead, make_head, prototypes
from fewshot_callbacks.protonet.module import ProtoNet

__all__ = [
    "Conv4",
    "DistanceRatioHead",
    "EpisodeProtocol",
    "ProtoNet",
    "SoftmaxHead",
    "evaluate_episodes",
    "make_backbone",
    "make_head",
    "prototypes",
    "resnet18",
]
