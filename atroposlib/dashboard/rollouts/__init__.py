"""Rollouts as people read them: kept while a run goes on, listed, and shown token by token."""
