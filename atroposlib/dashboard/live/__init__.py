"""The state of a live run: its stack, its servers, and the events in it."""
