"""Figures of a run: rows, Prometheus, speed."""
