"""Which Hugging Face tensors each parameter in vLLM's layout is made of. Pure: names and shapes
only.

Every parameter is the concatenation, along its first dimension, of one or more checkpoint tensors.
The same list serves both directions, so that what is saved is what was loaded.
"""

from __future__ import annotations

from dataclasses import dataclass

from example_trainer.models.geometry import Geometry


@dataclass(frozen=True)
class Part:
    """A checkpoint tensor and the rows of the parameter that it fills.

    Attributes:
        name: the tensor's name in the checkpoint.
        start: first row in the parameter.
        shape: the tensor's shape.
    """

    name: str
    start: int
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        """One past the last row in the parameter."""
        return self.start + self.shape[0]


Layout = dict[str, list[Part]]
"""For each parameter of the decoder, in the order of the forward pass, the checkpoint tensors that
make it up."""


def layout(geometry: Geometry) -> Layout:
    """The decoder's parameters and the checkpoint tensors behind each."""
    g = geometry
    plan: Layout = {}

    def whole(name: str, *shape: int) -> None:
        plan[name] = [Part(name, 0, shape)]

    def merged(
        prefix: str, target: str, sources: dict[str, int], *, inputs: int, bias: bool
    ) -> None:
        kinds: list[tuple[str, tuple[int, ...]]] = [("weight", (inputs,))] + (
            [("bias", ())] if bias else []
        )
        for kind, tail in kinds:
            parts, start = [], 0
            for source, rows in sources.items():
                parts.append(Part(f"{prefix}.{source}.{kind}", start, (rows, *tail)))
                start += rows
            plan[f"{prefix}.{target}.{kind}"] = parts

    whole("model.embed_tokens.weight", g.vocab_size, g.hidden_size)
    for i in range(g.num_layers):
        at, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        qkv = {"q_proj": g.q_size, "k_proj": g.kv_size, "v_proj": g.kv_size}
        merged(at, "qkv_proj", qkv, inputs=g.hidden_size, bias=g.qkv_bias)
        merged(at, "o_proj", {"o_proj": g.hidden_size}, inputs=g.q_size, bias=g.o_bias)
        if g.qk_norm:
            whole(f"{at}.q_norm.weight", g.head_dim)
            whole(f"{at}.k_norm.weight", g.head_dim)
        gate_up = {"gate_proj": g.intermediate_size, "up_proj": g.intermediate_size}
        merged(mlp, "gate_up_proj", gate_up, inputs=g.hidden_size, bias=g.mlp_bias)
        merged(
            mlp,
            "down_proj",
            {"down_proj": g.hidden_size},
            inputs=g.intermediate_size,
            bias=g.mlp_bias,
        )
        whole(f"model.layers.{i}.input_layernorm.weight", g.hidden_size)
        whole(f"model.layers.{i}.post_attention_layernorm.weight", g.hidden_size)
    whole("model.norm.weight", g.hidden_size)
    if not g.tie_word_embeddings:
        whole("lm_head.weight", g.vocab_size, g.hidden_size)
    return plan
