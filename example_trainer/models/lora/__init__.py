"""LoRA adapters on the decoder's merged projections."""
