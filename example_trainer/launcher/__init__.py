"""The launcher: start, watch and stop all processes of a run on this machine.

The shell scripts in `scripts/` call it.
"""
