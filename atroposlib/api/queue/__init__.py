"""The rules: which groups are held, how they wait, and who may take them. Pure: no I/O, no clock, no threads."""
