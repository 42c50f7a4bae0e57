"""In vLLM's engine core, the process that schedules."""
