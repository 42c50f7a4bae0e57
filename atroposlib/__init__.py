"""The rollout service and the SDK that environments are written with.

Never imports torch or vLLM.
"""

from atroposlib.compat.old_paths import install_old_paths

install_old_paths()
