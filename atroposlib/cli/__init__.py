"""Programs that a person starts; pyproject.toml names their commands."""
