"""Functions of the second version of the transforms: none."""
