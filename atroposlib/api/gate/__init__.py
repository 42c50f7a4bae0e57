"""What a request passes before it reaches a route: who may call, limits, reading of long bodies."""
