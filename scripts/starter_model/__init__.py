"""How the starter models in ``assets/`` are made: its habits, its tokenizer, its data and its training."""
