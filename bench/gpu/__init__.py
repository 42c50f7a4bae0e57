"""What the benchmarks of the weight bridge share.

Their scripts are one folder up and say how they are run.
"""
