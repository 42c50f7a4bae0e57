"""Everything that differs between the vLLM versions supported, one file a seam, and what their
imports log.
"""
