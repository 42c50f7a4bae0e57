"""The rollout service: environments post scored groups of sequences, a trainer takes batches of them."""
