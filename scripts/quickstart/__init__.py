"""Former path of the quick start, which is example_trainer/launcher/quickstart now."""
