"""Names of the second version of the transforms."""
