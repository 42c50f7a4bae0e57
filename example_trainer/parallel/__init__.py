"""One trainer of several processes: who they are, how they agree, and how the model's parameters
are spread over them.
"""
