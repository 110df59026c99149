"""Verify speakers, or faces, on a list of trials.

A trial is a pair of recordings that someone chose, as in the lists of
VoxCeleb and LFW.
"""

import tempfile
from pathlib import Path

import torch

from fewshot_callbacks import evaluate_trials, read_trials, trial_scores
from fewshot_callbacks.plots import error_tradeoff_curve, save

torch.manual_seed(0)

# embeddings of recordings by any model, and their names in the list
speakers = torch.arange(40).repeat_interleave(8)
embeddings = torch.randn(40, 32)[speakers] + 0.9 * torch.randn(
    len(speakers), 32
)
names = [
    f"id{speaker:05}/video/{n % 8}.wav"
    for n, speaker in enumerate(speakers.tolist())
]

# A line of the list has 1 (same speaker) or 0, and two recordings.
path = Path(tempfile.mkdtemp()) / "trials.txt"
with path.open("w") as file:
    for _ in range(4000):
        one = int(torch.randint(len(names), ()))
        pool = (
            (speakers == speakers[one]).nonzero()
            if torch.rand(()) < 0.5
            else (speakers != speakers[one]).nonzero()
        )
        two = int(pool[torch.randint(len(pool), ())])
        file.write(
            f"{int(speakers[one] == speakers[two])} "
            f"{names[one]} {names[two]}\n"
        )

trials = read_trials(path)
scores = trial_scores(embeddings, *trials.rows(names))
report = evaluate_trials(
    scores,
    trials.same,
    # Trials that share a speaker are not independent, so intervals need
    # the speakers.
    first=trials.first,
    second=trials.second,
    metrics=("eer", "min_dcf@0.01", "min_dcf@0.05", "tar@far0.01"),
)
print(report)
print(
    f"a cosine of at least {report.thresholds['tar@far0.01']:.3f} "
    "accepts at most 1 % of the pairs of different speakers"
)
counts = report.pair_counts
save(
    error_tradeoff_curve(
        counts.false_match_rate, counts.false_non_match_rate
    ),
    "det.png",
)
