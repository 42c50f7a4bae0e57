"""Programs that a person starts: `python -m atroposlib.cli.run_api`."""
