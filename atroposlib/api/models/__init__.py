"""What goes over the wire and what is remembered: records, requests, posted groups."""
