"""Score tiles made and counted in plain PyTorch, on any device."""
