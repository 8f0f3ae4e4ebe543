"""How ranks share a model and add gradients: DDP, FSDP2, exact sums."""
