"""Rewards meaning: the cosine between embeddings of a completion and of its reference.

The embedding model runs through transformers, which loads PyTorch for it: nothing else of an
environment does.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from atroposlib.compat.reward_fns.reward_function import TextReward

MODEL = "sentence-transformers/all-MiniLM-L6-v2"


class CosineScaledReward(TextReward):
    """1 - `scale_factor` · (1 - cos(completion, reference)), within `min_reward` and `max_reward`.

    Args:
        model_name: embedding model, by name or folder.
        scale_factor: how much a difference in meaning costs; the cosine itself with 1.
        min_reward, max_reward: limits.
        default_reward: taken for compatibility; a reward that cannot be computed raises.

    Raises:
        ImportError: the model or PyTorch cannot be had.
    """

    needs_reference = True
    model_name: str = MODEL
    scale_factor: float = 1.0
    min_reward: float = -1.0
    max_reward: float = 1.0
    default_reward: float = 0.0

    def __init__(self, *values: Any, **options: Any) -> None:
        super().__init__(*values, **options)
        embedding_model(self.model_name)

    def score(self, text: str, gold: str, opened: str) -> float:
        likeness = cosine(*self._embeddings((text, gold)))
        scaled = 1.0 - (1.0 - likeness) * self.scale_factor
        return min(self.max_reward, max(self.min_reward, scaled))

    def _embeddings(self, texts: tuple[str, ...]) -> list[np.ndarray]:
        """[hidden] float for each text: the mean over its tokens."""
        tokenizer, model = embedding_model(self.model_name)
        vectors = []
        for text in texts:
            fields = tokenizer(text, truncation=True, return_tensors="pt")
            hidden = model(**fields)[0].detach().numpy()[0]
            vectors.append(np.asarray(hidden.mean(axis=0), dtype=np.float64))
        return vectors


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """Of the angle between two vectors; 0 where one has no length."""
    lengths = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / lengths if lengths else 0.0


@cache
def embedding_model(name: str) -> tuple[Any, Any]:
    """Tokenizer and model, loaded once for each process.

    Raises:
        ImportError: they cannot be loaded; says what is missing.
    """
    from transformers import AutoModel, AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name), AutoModel.from_pretrained(name).eval()
    except (OSError, ValueError, ImportError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ImportError(
            f"reward cosine_scaled: no embedding model {name!r}: {reason}; give a folder as model_name"
        ) from error
