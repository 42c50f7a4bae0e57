"""What both sides of the weight bridge agree on: layouts, checksums, leases, messages.

No vLLM and no HTTP.
"""
