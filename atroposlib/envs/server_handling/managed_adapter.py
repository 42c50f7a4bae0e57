"""A managed server behind the face of `AsyncOpenAI`, for libraries that bring their own conversation loops."""

from typing import Any


class _Create:
    """An object whose `create` is the given coroutine function."""

    def __init__(self, create: Any):
        self.create = create


class _Chat:
    def __init__(self, create: Any):
        self.completions = _Create(create)


class ManagedServerAdapter:
    """`client.chat.completions.create(...)` and `client.completions.create(...)` go to the managed server, which keeps tokens.

    Args:
        managed_server: a `ManagedServer`.
        base_url: what `client.base_url` says.
    """

    def __init__(self, managed_server: Any, base_url: str):
        self.managed_server = managed_server
        self.base_url = base_url
        self.chat = _Chat(managed_server.chat_completion)
        self.completions = _Create(managed_server.completion)

    async def post(self, path: str, body: dict[str, Any], cast_to: type) -> Any:
        """Raw requests would go past the record of tokens, so there are none."""
        raise NotImplementedError(f"POST {path}: only chat.completions.create and completions.create keep tokens")

    def copy(self, **kwargs: Any) -> "ManagedServerAdapter":
        """Itself: options such as timeouts are the server's."""
        return self
