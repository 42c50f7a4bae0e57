"""Access control and limits of requests and connections, shared by the rollout service, its page
and the proxy.
"""
