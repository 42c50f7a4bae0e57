"""Logprobs of each family's decoder equal vLLM's on the same small checkpoint, in float32."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from example_trainer.models import load_model
from example_trainer.models.packing import Packing

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.e2e,
    pytest.mark.timeout(400),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
]
ROOT = Path(__file__).resolve().parents[2]
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 1e4,
}
CASES: dict[str, dict[str, Any]] = {
    "Phi3": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
        }
    },
    "Glm4": {"head_dim": 64},
    "Olmo2": {},
    "Gemma3": {
        "head_dim": 64,
        "sliding_window": 20,
        "query_pre_attn_scalar": 50,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "Llama": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "Qwen2": {"head_dim": 64},
    "Mistral": {"sliding_window": 20},
    "Qwen3": {"head_dim": 64, "rope_parameters": YARN},  # vLLM refuses Qwen's windows
    "Qwen3Moe": {
        "head_dim": 64,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
}
SIZES = {
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 320,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
SAMPLE = """
import json, sys
from vllm import LLM, SamplingParams

prompt = json.loads(sys.argv[2])
llm = LLM(model=sys.argv[1], skip_tokenizer_init=True, dtype="float32", max_model_len=128,
          enforce_eager=True, gpu_memory_utilization=0.2)
asked = SamplingParams(max_tokens=8, logprobs=0, prompt_logprobs=0, detokenize=False, seed=3)
request = llm.generate([{"prompt_token_ids": prompt}], asked)[0]
tokens = list(request.outputs[0].token_ids)
rows = [*request.prompt_logprobs[1:], *request.outputs[0].logprobs]
logprobs = [row[token].logprob for row, token in zip(rows, [*prompt[1:], *tokens])]
print(json.dumps([tokens, logprobs]))
"""


@pytest.mark.parametrize("family", CASES)
def test_vllm_has_the_same_logprobs(family: str, tmp_path: Path) -> None:
    """Over a prompt longer than the windows, and over sampled tokens."""
    kind = getattr(transformers, f"{family}ForCausalLM")
    torch.manual_seed(1)
    reference = kind(kind.config_class(**(SIZES | CASES[family]))).float()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    reference.save_pretrained(tmp_path)
    prompt = torch.randint(3, 256, (60,), generator=torch.Generator().manual_seed(2)).tolist()
    done = subprocess.run(
        [sys.executable, "-c", SAMPLE, str(tmp_path), json.dumps(prompt)],
        cwd=ROOT,
        env={
            "PATH": "/usr/bin:/bin",
            "HOME": str(tmp_path),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=380,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    tokens, theirs = json.loads(done.stdout.splitlines()[-1])
    sequence = torch.tensor([*prompt, *tokens])
    model = load_model(str(tmp_path), torch.float32)
    targets = Packing([len(sequence) - 1])
    with torch.no_grad():
        hidden = model(sequence, Packing([len(sequence)]))
        ours, _ = model.chosen_logprobs(hidden[:-1], sequence[1:], targets)
    assert ours.std() > 0.5
    torch.testing.assert_close(ours, torch.tensor(theirs), atol=1e-4, rtol=1e-4)
