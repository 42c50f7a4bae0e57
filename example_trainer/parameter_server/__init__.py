"""Holds the newest weights between a trainer, which pushes them and goes on, and the vLLM servers,
which get them from here.
"""
