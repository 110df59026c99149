"""What cannot be built is refused in the constructor, with the setting and the way out."""

import math

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


def logits_of(shots: int, representation: str) -> Tensor:
    return class_logits(SoftmaxHead(), torch.zeros(1, 2), torch.zeros(3, shots, 2), representation)


def embedding(**settings) -> EmbeddingModule:
    return EmbeddingModule(**({"backbone": nn.Identity(), "loss": SoftAveragePrecisionLoss()} | settings))


TRANSDUCTIVE = {"batch_statistics": True, "evaluation_batches": "episodes"}


@pytest.mark.parametrize(
    ("refused", "words"),
    [
        (lambda: Conv4()(torch.randn(1, 3, 15, 40)), r"halves the image four times; 15x40 pixels .* Resize .* 16x16"),
        (lambda: Conv4().output_dim(8), "8x8 pixels are too few"),
        (lambda: Conv4()(torch.randn(1, 1, 32, 32)), r"in_channels=3\) was given .* 1 channels, .* Use in_channels=1"),
        (lambda: Conv4(0), "in_channels=0: images have at least one channel"),
        (lambda: Conv4(width=0), "width=0: Conv4 needs at least one filter"),
        (lambda: Conv4(init="xavier"), r"Conv4: there is no init='xavier'\. Choose 'pytorch' or 'he_fan_out'\."),
        (lambda: make_backbone("resnet18", in_channels=0), "in_channels=0"),
        (lambda: make_backbone("vgg"), r"no backbone 'vgg'. Choose 'conv4' or 'resnet18', or pass an nn.Mod"),
        (lambda: make_head("cosine"), r"There is no head 'cosine'. Choose 'softmax' or 'dr', or pass an nn.Module"),
        (lambda: DistanceRatioHead(math.inf), "log_rho=inf is not finite"),
        (lambda: SoftmaxHead("cosine"), r"SoftmaxHead: there is no distance='cosine'\. Choose 'euclidean'"),
        (lambda: logits_of(2, "median"), r"class_logits: there is no representation='median'\. Choose 'mean'"),
        (lambda: logits_of(0, "nearest"), r"support of shape \(3, 0, 2\) has 0 shots\. Give .* shot >= 1"),
        (lambda: ClassVectors(0, 2), r"ClassVectors\(classes=0, dim=2\): both must be at least 1"),
        (lambda: EpisodeProtocol(ways=1), r"EpisodeProtocol\(ways=1\): use ways >= 2"),
        (lambda: EpisodeProtocol(queries=0), r"EpisodeProtocol\(queries=0\): use queries >= 1"),
        (lambda: EpisodeProtocol(seed=-1), r"EpisodeProtocol\(seed=-1\): use seed >= 0"),
        (lambda: ProtoNet(shots=0), r"shots=0: .* Use shots >= 1"),
        (lambda: ProtoNet(episodes_per_batch=0), r"episodes_per_batch=0: a batch needs at least one episode"),
        (lambda: ProtoNet(learning_rate=0.0), r"learning_rate=0.0: Adam needs a positive step"),
        (lambda: ProtoNet(batch_statistics=True), r"a batch is not an episode\. Use evaluation_batches='episodes'"),
        (lambda: ProtoNet(nn.Flatten(), **TRANSDUCTIVE), "and Flatten has none"),
        (lambda: embedding(micro_batch=0), r"micro_batch=0.*Use 1 or more, or None"),
        (lambda: embedding(ap_every_n_steps=-1), r"ap_every_n_steps=-1.*0 for never"),
        (lambda: embedding(learning_rate=0.0), r"learning_rate=0\.0.*positive"),
        (lambda: embedding(loss=3), r"loss 3 cannot be called"),
    ],
)
def test_what_cannot_be_built_or_embedded_is_refused(as_users_run_it: None, refused, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        refused()
