"""A client's own side: its local model, its LoRA layers, its updates, and pre-training."""
