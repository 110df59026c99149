"""Verify speakers, or faces, on a list of trials: pairs of recordings that someone chose, as VoxCeleb and LFW have them."""

import tempfile
from pathlib import Path

import torch

from fewshot_callbacks import evaluate_trials, read_trials, trial_scores
from fewshot_callbacks.plots import error_tradeoff_curve, save

torch.manual_seed(0)

# embeddings of recordings, by any model, and the name of each as the list has it
speakers = torch.arange(40).repeat_interleave(8)
embeddings = torch.randn(40, 32)[speakers] + 0.9 * torch.randn(
    len(speakers), 32
)
names = [
    f"id{speaker:05}/video/{n % 8}.wav"
    for n, speaker in enumerate(speakers.tolist())
]

# a list of trials: 1 or 0, and two recordings
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
            f"{int(speakers[one] == speakers[two])} {names[one]} {names[two]}\n"
        )

trials = read_trials(path)
scores = trial_scores(embeddings, *trials.rows(names))
report = evaluate_trials(
    scores,
    trials.same,
    first=trials.first,  # the speakers: trials that share one are not independent
    second=trials.second,
    metrics=("eer", "min_dcf@0.01", "min_dcf@0.05", "tar@far0.01"),
)
print(report)
print(
    f"accept from a cosine of {report.thresholds['tar@far0.01']:.3f} to let in at most 1 % of the others"
)
counts = report.pair_counts
save(
    error_tradeoff_curve(
        counts.false_match_rate, counts.false_non_match_rate
    ),
    "det.png",
)
