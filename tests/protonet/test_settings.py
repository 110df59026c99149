"""What cannot be built is refused in the constructor, with the setting and the way out."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fewshot_callbacks.losses import SoftAveragePrecisionLoss
from fewshot_callbacks.protonet import (
    ClassVectors,
    Conv4,
    DistanceRatioHead,
    EmbeddingModule,
    EpisodeProtocol,
    ProtoNet,
    SoftmaxHead,
    class_logits,
    make_backbone,
    make_head,
)
from tests.messages import refused


def logits_of(shots: int, representation: str) -> Tensor:
    return class_logits(SoftmaxHead(), torch.zeros(1, 2), torch.zeros(3, shots, 2), representation)


def embedding(**settings) -> EmbeddingModule:
    return EmbeddingModule(**({"backbone": nn.Identity(), "loss": SoftAveragePrecisionLoss()} | settings))


TRANSDUCTIVE = {"batch_statistics": True, "evaluation_batches": "episodes"}


@pytest.mark.parametrize(
    ("build", "facts"),
    [
        (lambda: Conv4()(torch.randn(1, 3, 15, 40)), ("Conv4", "15x40", "16x16")),
        (lambda: Conv4().output_dim(8), ("Conv4", "8x8", "16x16")),
        (
            lambda: Conv4()(torch.randn(1, 1, 32, 32)),
            ("Conv4(in_channels=3)", "1 channel", "(1, 1, 32, 32)", "in_channels=1"),
        ),
        (lambda: Conv4(0), ("in_channels=0", 3, 1)),
        (lambda: Conv4(width=0), ("Conv4", "width=0", "width >= 1")),
        (lambda: Conv4(init="xavier"), ("Conv4", "init='xavier'", "'pytorch'", "'he_fan_out'")),
        (lambda: make_backbone("resnet18", in_channels=0), ("in_channels=0", 3, 1)),
        (lambda: make_backbone("vgg"), ("backbone", "'vgg'", "'conv4'", "'resnet18'", "nn.Module")),
        (lambda: make_head("cosine"), ("head", "'cosine'", "'softmax'", "'dr'", "nn.Module")),
        (lambda: DistanceRatioHead(math.inf), ("log_rho=inf", "finite")),
        (lambda: SoftmaxHead("cosine"), ("SoftmaxHead", "distance='cosine'", "'euclidean'", "'angular'")),
        (lambda: logits_of(2, "median"), ("class_logits", "representation='median'", "'mean'", "'nearest'")),
        (lambda: logits_of(0, "nearest"), ("support", "(3, 0, 2)", "shot >= 1")),
        (lambda: ClassVectors(0, 2), ("ClassVectors(classes=0, dim=2)", 1)),
        (lambda: EpisodeProtocol(ways=1), ("EpisodeProtocol(ways=1)", "ways >= 2")),
        (lambda: EpisodeProtocol(queries=0), ("EpisodeProtocol(queries=0)", "queries >= 1")),
        (lambda: EpisodeProtocol(seed=-1), ("EpisodeProtocol(seed=-1)", "seed >= 0")),
        (lambda: ProtoNet(shots=0), ("ProtoNet(shots=0)", "shots >= 1")),
        (lambda: ProtoNet(episodes_per_batch=0), ("ProtoNet(episodes_per_batch=0)", 1)),
        (lambda: ProtoNet(learning_rate=0.0), ("ProtoNet(learning_rate=0.0)", "positive")),
        (lambda: ProtoNet(batch_statistics=True), ("ProtoNet(batch_statistics=True)", "evaluation_batches='episodes'")),
        (
            lambda: ProtoNet(nn.Flatten(), **TRANSDUCTIVE),
            ("ProtoNet(batch_statistics=True)", "Flatten", "batch_statistics=False"),
        ),
        (
            lambda: ProtoNet(evaluation_batches="all"),
            ("ProtoNet", "evaluation_batches='all'", "'images'", "'episodes'"),
        ),
        (lambda: embedding(micro_batch=0), ("EmbeddingModule(micro_batch=0)", 1, "None")),
        (lambda: embedding(ap_every_n_steps=-1), ("EmbeddingModule(ap_every_n_steps=-1)", 0)),
        (lambda: embedding(learning_rate=0.0), ("EmbeddingModule(learning_rate=0.0)", "positive")),
        (lambda: embedding(loss=3), ("EmbeddingModule", "loss", 3, "loss(embeddings, labels)")),
    ],
)
def test_what_cannot_be_built_or_embedded_is_refused(as_users_run_it: None, build, facts: tuple[Any, ...]) -> None:
    with refused(ValueError, *facts):
        build()
