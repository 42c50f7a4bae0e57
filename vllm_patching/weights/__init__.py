"""The parameters of each model family, and their shares of tensor-parallel ranks.

Standard library only: no torch, no vLLM.
"""
