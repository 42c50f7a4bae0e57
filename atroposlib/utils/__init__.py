"""Small helpers for environments, one module per need."""
