"""How the starter model in ``assets/starter_model`` is made: its habits, its tokenizer, its data and its training."""
