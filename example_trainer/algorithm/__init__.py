"""The loss and what it is made of: pure functions of tensors."""
