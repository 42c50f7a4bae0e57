"""Training with the bits that vLLM samples with: forward passes on its kernels, backward passes of our own in a fixed order."""
