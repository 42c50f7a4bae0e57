"""Where the service keeps its state."""
