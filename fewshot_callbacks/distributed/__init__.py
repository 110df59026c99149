"""What processes that evaluate one set together say to each other: over gloo, NCCL, or nobody."""
