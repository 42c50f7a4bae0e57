"""Everything that differs between the vLLM versions supported, one file a seam, and nothing else."""
