"""Binary codes: bits of the sign, compared by Hamming distance, in a quarter of the memory."""

import torch

from fewshot_callbacks import DEFAULT_METRICS, evaluate_retrieval

torch.manual_seed(0)
labels = torch.arange(500) % 20
embeddings = torch.randn(20, 64)[labels] + 0.8 * torch.randn(500, 64)

floats = evaluate_retrieval(embeddings, labels)
codes = evaluate_retrieval(
    embeddings > 0, labels, similarity="hamming"
)  # a byte for each bit
print(
    f"float32, cosine: mAP {floats.mAP:.3f}; 64 bits, Hamming: mAP {codes.mAP:.3f}"
)

# papers on hashing report AP@5000 divided by what was found
report = evaluate_retrieval(
    embeddings > 0,
    labels,
    similarity="hamming",
    metrics=(*DEFAULT_METRICS, "map@100_found"),
)
print(
    {
        key: round(value, 3)
        for key, value in report.metrics().items()
        if key.startswith("map@100")
    }
)
