"""Exact ranks and threshold counts of all query-gallery pairs, in bounded memory; knows no metric."""
