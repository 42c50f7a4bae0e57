"""Pages for people to read groups on."""
