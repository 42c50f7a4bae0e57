"""The public service's functions that choose groups for a batch."""
