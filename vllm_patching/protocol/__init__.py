"""The contract of both sides of the weight bridge: layouts, checksums, messages.

No vLLM and no HTTP.
"""
