"""One optimizer step, and what lasts beyond it: masters, checkpoints, runs, memory."""
