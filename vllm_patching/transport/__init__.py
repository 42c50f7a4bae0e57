"""Transport of weights: process groups, shared memory, files of adapters."""
