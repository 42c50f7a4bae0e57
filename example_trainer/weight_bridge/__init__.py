"""The trainer's half of the weight bridge: one small interface, one file for each way to carry the
weights.
"""
