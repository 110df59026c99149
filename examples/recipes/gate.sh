#!/bin/sh
# Fail if the embeddings of a checkpoint are not good enough, or are worse
# than the reference.
#
#     sh gate.sh model.ckpt reference.report.npz
#
# The exit status is 3 if a requirement is not met. If the reference does
# not exist, this run writes it.
set -eu

checkpoint=$1
reference=$2

python "$(dirname "$0")/gate.py" "$checkpoint"
set -- embeddings.npz --metrics mAP recall@1 --slices camera
if [ ! -f "$reference" ]; then
    fewshot evaluate "$@" --save "$reference"
fi
fewshot evaluate "$@" --against "$reference" --save new.report.npz \
    --require "mAP >= 0.60" \
    --require "worst(camera) recall@1.high >= 0.70" \
    --require "gain(mAP).low >= -0.02"
