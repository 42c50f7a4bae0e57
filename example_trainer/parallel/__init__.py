"""One trainer of several processes: their numbers, how they agree, and how the model's parameters
are spread over them.
"""
