"""Shared parts of the benchmarks of the weight bridge.

Their scripts are one folder up and describe their use.
"""
