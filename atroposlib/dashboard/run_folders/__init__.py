"""Readers of what a run writes into its folder: figures, evaluations, events.

They follow files that grow.
"""
