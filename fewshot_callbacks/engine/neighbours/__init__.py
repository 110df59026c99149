"""Which pairs score highest: the first candidates of each query, and all pairs above a score."""
