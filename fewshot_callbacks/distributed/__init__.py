"""Collective communication between processes that evaluate one set together, over gloo or NCCL."""
