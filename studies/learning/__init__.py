"""Trainings that compare methods, on word problems."""
