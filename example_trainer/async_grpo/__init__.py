"""Starts, places and watches the processes of an asynchronous run on Ray.

Tokens and weights never pass through Ray.
"""
