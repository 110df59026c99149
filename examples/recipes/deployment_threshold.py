"""Choose a threshold on validation data, and see what it costs on other data, with classes that it has not seen."""

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
chosen = validation.at_precision[
    0.95
]  # the smallest threshold with a precision of 95 %
print(
    f"threshold {chosen.threshold:.3f}: precision {chosen.precision:.3f}, recall {chosen.recall:.3f}"
)

deployed = evaluate_retrieval(
    *made(40), threshold=chosen.threshold
)  # twice as many classes
print(
    f"on new classes: precision {deployed.decision.precision:.3f}, recall {deployed.decision.recall:.3f}"
)
verification = validation.at_false_match_rate[
    0.001
]  # accepts at most 0.1 % of the irrelevant pairs
print(
    f"threshold {verification.threshold:.3f}: {verification.false_non_match_rate:.1%} of relevant pairs rejected"
)
# precision falls with the number of irrelevant pairs; rates of errors do not depend on it
print(
    {
        key: round(value, 4)
        for key, value in validation.metrics().items()
        if key.startswith(("fnmr", "eer"))
    }
)
