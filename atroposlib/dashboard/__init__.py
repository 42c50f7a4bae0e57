"""The page on which a person sees a run: served by the rollout service at /ui, and by `view-run`
from files.
"""
