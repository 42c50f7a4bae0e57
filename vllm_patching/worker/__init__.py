"""In vLLM's workers, which hold the weights."""
