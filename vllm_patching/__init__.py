"""Code inside vLLM's processes, and the manifest that both sides of the weight bridge share."""
