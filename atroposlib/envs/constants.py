"""Names of the flag namespaces: `--env.group_size`, `--openai.base_url`, and the same keys in a YAML file."""

ENV_NAMESPACE = "env"
OPENAI_NAMESPACE = "openai"
SERVER_MANAGER_NAMESPACE = "server"
NAMESPACE_SEP = "."
