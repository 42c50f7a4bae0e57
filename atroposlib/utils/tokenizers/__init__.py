"""Tokenizers with corrected chat templates."""
