"""The rollout service and the SDK that environments are written with. Never imports torch or vLLM."""
