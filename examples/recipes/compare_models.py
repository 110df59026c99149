"""Two models on the same items: which differences are significant?"""

import math

import torch

from fewshot_callbacks import compare_reports, evaluate_retrieval

torch.manual_seed(0)
labels = torch.arange(600) % 30
centres, noise = torch.randn(30, 32), torch.randn(600, 32)
first = evaluate_retrieval(centres[labels] + 1.5 * noise, labels)
second = evaluate_retrieval(
    centres[labels] + 1.4 * noise + 0.3 * torch.randn(600, 32), labels
)

# The difference is taken query by query.
for name, difference in compare_reports(first, second).items():
    low, high = difference.interval
    # Metrics of pairs have no value per query, and so no interval.
    if math.isnan(low):
        continue
    is_significant = difference.is_beyond_chance
    verdict = "significant" if is_significant else "not significant"
    print(
        f"{name:<20}{difference.first:.3f} - {difference.second:.3f}, "
        f"{low:+.3f} to {high:+.3f}: {verdict}"
    )
