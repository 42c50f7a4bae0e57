"""What the rollout service knows while the run goes on: its stack, its servers, and what happens to them."""
