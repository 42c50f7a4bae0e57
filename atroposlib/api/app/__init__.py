"""The service as an application: its routes, and what is between them and the rules."""
