"""PyTorch Lightning callbacks that tell the truth about an embedding while it trains."""
