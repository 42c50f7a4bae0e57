"""The rollout service: it queues scored groups of rollouts and hands them to trainers in batches."""
