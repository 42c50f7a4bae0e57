"""Trainings with deterministic mode on and off."""
