"""In the server's front end: routes, the bridge's states, adapters, metrics."""
