"""How the starter models in ``assets/`` are made: their habits, their tokenizer, their data and
their training.
"""
