"""What runs an environment, behind `BaseEnv`: command line, settings, serving, processing, the service's client, reports."""
