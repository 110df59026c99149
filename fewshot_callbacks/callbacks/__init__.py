"""Lightning callbacks: find embeddings in a running Trainer, hand them down, log what comes back."""
