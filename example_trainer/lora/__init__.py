"""Low-rank adapters: trained beside frozen weights, saved and loaded in PEFT's format."""
