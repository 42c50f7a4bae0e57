"""Habits, tokenizer, data and training of the starter models in ``assets/``."""
