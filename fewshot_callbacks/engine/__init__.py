"""Exact ranks and counts of all query-candidate pairs, in bounded memory, without metrics. See README.md."""
