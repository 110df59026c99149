"""Score tiles made and counted on the CPU with compiled kernels."""
