"""Processes that are started, watched and stopped whole: what the trainer and the scripts both
need. Standard library only.
"""
