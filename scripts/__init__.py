"""Commands for people: set up, quick start, test."""
