"""Score tiles made and counted on a GPU by kernels in Triton, so that no tile leaves the registers."""
