"""A checkpoint folder of the light servers' model, without weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.fleet_server import GEOMETRY


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    g, folder = GEOMETRY, tmp_path_factory.mktemp("model")
    config = {
        "model_type": g.model_type, "num_hidden_layers": g.num_layers, "hidden_size": g.hidden_size,
        "intermediate_size": g.intermediate_size, "num_attention_heads": g.num_heads, "num_key_value_heads": g.num_kv_heads,
        "head_dim": g.head_dim, "vocab_size": g.vocab_size, "tie_word_embeddings": g.tied,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder
