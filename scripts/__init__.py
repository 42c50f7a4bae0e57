"""What a person types: set up, quick start, test."""
