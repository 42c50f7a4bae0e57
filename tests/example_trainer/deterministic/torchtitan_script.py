"""A training in the shape of TorchTitan's deterministic_vllm_rl experiment, on this project's
package. Run it as a program.

It makes its weights under TorchTitan's names and loads them. It trains with exact log-probabilities
by REINFORCE on one token, and hands the weights back under those names.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch

from example_trainer.deterministic import (
    Qwen3ModelArgs,
    Qwen3VLLMCompatModel,
    enable_batch_invariant_backward_mode,
    init_batch_invariance,
    torchtitan_to_vllm_compat,
    vllm_compat_to_torchtitan,
)

WANTED = 5


def random_weights(args: Qwen3ModelArgs) -> dict[str, torch.Tensor]:
    """Names in a checkpoint of TorchTitan's Qwen3."""
    q, kv = args.n_heads * args.head_dim, (args.n_kv_heads or args.n_heads) * args.head_dim
    shapes = {"tok_embeddings.weight": (args.vocab_size, args.dim), "norm.weight": (args.dim,)}
    for layer in range(args.n_layers):
        at = f"layers.{layer}."
        shapes |= {
            f"{at}attention.{name}.weight": (rows, args.dim)
            for name, rows in (("wq", q), ("wk", kv), ("wv", kv))
        }
        shapes |= {
            f"{at}attention.wo.weight": (args.dim, q),
            f"{at}feed_forward.w2.weight": (args.dim, args.hidden_dim),
        }
        shapes |= {
            f"{at}feed_forward.{name}.weight": (args.hidden_dim, args.dim) for name in ("w1", "w3")
        }
        shapes |= {
            f"{at}attention.{name}.weight": (args.head_dim,) for name in ("q_norm", "k_norm")
        }
        shapes |= {f"{at}{name}.weight": (args.dim,) for name in ("attention_norm", "ffn_norm")}
    return {
        name: torch.randn(shape) * 0.1 if len(shape) > 1 else torch.ones(shape)
        for name, shape in shapes.items()
    }


def main() -> int:
    init_batch_invariance()
    enable_batch_invariant_backward_mode()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    args = Qwen3ModelArgs(
        dim=32, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=11, head_dim=16 if device.type == "cpu" else 128, hidden_dim=48,
        max_seq_len=64, qk_norm=True, depth_init=True, eos_id=0, enable_weight_tying=True,
    )  # fmt: skip
    titan = random_weights(args)
    model = Qwen3VLLMCompatModel(args)
    model.load_state_dict(torchtitan_to_vllm_compat(titan), strict=False)
    model = model.to(device)
    model.train()
    before = {name: parameter.clone() for name, parameter in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    prompt = torch.randint(0, args.vocab_size, (1, 6), device=device).expand(16, 6)
    shares = []
    for _ in range(12):
        with torch.no_grad():
            sampled = torch.multinomial(model(prompt)[:, -1].float().softmax(-1), 1)
            again = model(
                torch.cat([prompt, sampled], dim=1),
                attention_masks=None,
                positions=torch.arange(7, device=device),
            )
        logits = model(torch.cat([prompt, sampled], dim=1))
        assert torch.equal(logits, again)
        logprobs = logits[:, -2].float().log_softmax(-1).gather(1, sampled).squeeze(1)
        rewards = (sampled == WANTED).float().squeeze(1)
        loss = -((rewards - 1 / args.vocab_size) * logprobs).mean()
        optimizer.zero_grad()
        loss.backward()
        assert all(
            parameter.grad is not None and parameter.grad.isfinite().all()
            for parameter in model.parameters()
        )
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        shares.append(float(model(prompt)[0, -1].float().softmax(-1)[WANTED]))
    after = vllm_compat_to_torchtitan(model.state_dict())
    assert {name: tensor.shape for name, tensor in titan.items()}.items() <= {
        n: t.shape for n, t in after.items()
    }.items()
    assert all(
        not torch.equal(before[name], parameter) for name, parameter in model.state_dict().items()
    )
    assert shares[-1] > 3 * shares[0] or shares[-1] > 0.9, shares
    print(f"learned: {shares[0]:.2f} to {shares[-1]:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
