"""How weights travel: process groups, shared memory, files of adapters."""
