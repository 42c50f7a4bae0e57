"""From the rollout service's groups to packed tensors on the device."""
