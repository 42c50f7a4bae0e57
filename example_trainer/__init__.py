"""The GRPO trainer and the server that shares weights with it."""
