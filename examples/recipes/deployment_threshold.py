"""Choose a threshold on validation data, and try it on new classes."""

import torch

from fewshot_callbacks import DEFAULT_METRICS, evaluate_retrieval

torch.manual_seed(0)


def made(classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    labels = torch.arange(30 * classes) % classes
    return torch.randn(classes, 64)[labels] + 0.9 * torch.randn(
        len(labels), 64
    ), labels


validation = evaluate_retrieval(
    *made(20), metrics=(*DEFAULT_METRICS, "fnmr@fmr0.001", "eer")
)
# the lowest threshold with a precision of 95 %
chosen = validation.at_precision[0.95]
print(
    f"threshold {chosen.threshold:.3f}: "
    f"precision {chosen.precision:.3f}, recall {chosen.recall:.3f}"
)

# twice as many classes, none of them seen before
deployed = evaluate_retrieval(*made(40), threshold=chosen.threshold)
print(
    f"on new classes: precision {deployed.decision.precision:.3f}, "
    f"recall {deployed.decision.recall:.3f}"
)
# the lowest threshold that accepts at most 0.1 % of irrelevant pairs
verification = validation.at_false_match_rate[0.001]
print(
    f"threshold {verification.threshold:.3f}: "
    f"{verification.false_non_match_rate:.1%} of relevant pairs rejected"
)
# Precision falls as irrelevant pairs are added. Error rates do not.
print(
    {
        key: round(value, 4)
        for key, value in validation.metrics().items()
        if key.startswith(("fnmr", "eer"))
    }
)
