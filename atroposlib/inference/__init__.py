"""Clients of inference servers: OpenAI-compatible endpoints and vLLM's token-in, token-out
`/generate`.
"""
