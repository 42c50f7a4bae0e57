"""Tasks: one file each, every one a program with the subcommands serve, process and evaluate."""
