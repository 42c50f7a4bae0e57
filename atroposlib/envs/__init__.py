"""The environment SDK: `BaseEnv`, its configuration and its clients for the rollout service and
inference servers.
"""
