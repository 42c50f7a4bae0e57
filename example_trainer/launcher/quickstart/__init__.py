"""The quick start: rollout service, vLLM, environment and trainer on one machine, from one command."""
