"""Programs that made the models and pictures of this repository."""
