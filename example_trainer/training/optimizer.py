"""AdamW on float32 masters, apart from the weights that the model computes with.

The model's parameters may be bf16, and may be views on memory that an inference server samples from: they are read by the
forward pass and written by `write_weights` alone, at a moment that the weight bridge chooses. Gradients leave the
parameters as soon as they are complete and are summed in float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from example_trainer.config import TrainerConfig
from example_trainer.errors import CheckpointError, NonFiniteError
from example_trainer.models import Decoder
from example_trainer.models.gradients import GradientSums
from example_trainer.models.shards import Shards

_REMEDIES = {
    True: "lower --lr or --max-grad-norm, and look at the last lines of metrics.jsonl; --skip-nonfinite N leaves out up to N "
    "such batches in a row",
    False: "lower --lr, and go on from the newest checkpoint (--resume auto)",
}
"""By whether the weights are still those of the step before."""

LearningRateSchedule = Literal["constant", "linear", "cosine"]


def learning_rate_factor(step: int, schedule: LearningRateSchedule, warmup_steps: int, total_steps: int) -> float:
    """What the learning rate is multiplied by at optimizer step `step`, counted from 0.

    It rises in equal parts over the warm-up, reaching 1 with the first step after it; then stays (constant), or falls to 0
    at `total_steps` along a line (linear) or half a cosine wave (cosine, arXiv:1608.03983).
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    if schedule == "constant":
        return 1.0
    done = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return 1.0 - done if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))


@dataclass(frozen=True)
class StepReport:
    """What one optimizer step did.

    Attributes:
        grad_norm: global L2 norm of the gradient before clipping.
        lr: learning rate of the step.
    """

    grad_norm: float
    lr: float


class MasterAdamW:
    """AdamW (arXiv:1711.05101) over float32 copies of a model's trainable parameters.

    Made from the weights as they are now: make it after the checkpoint is read, and before a single-copy bridge puts the
    parameters onto the server's memory.

    Args:
        model: its parameters with requires_grad are trained.
        lr, betas, eps, weight_decay: as in torch.optim.AdamW; decay acts on matrices only, not on norms and biases.
        max_grad_norm: gradients are scaled down to this global norm; 0 leaves them as they are.
        schedule, warmup_steps, total_steps: see learning_rate_factor.
        shards: what this rank holds of the parameters; masters, gradients and moments are of the same part. With several
            ranks `step` and everything named `whole` is collective.

    Attributes:
        steps: optimizer steps taken, which is the weight version of the masters.
        masters: float32 weights by parameter, this rank's part.
        sums: where a backward pass can add the gradients itself (`Decoder.arithmetic.sums`); None where they are taken from the
            parameters: under FSDP2, which has them whole only behind its hooks, and where only adapters are trained.
        sound: whether masters and moments are those of `steps` whole steps, and finite. False while a step changes them, and
            for good if it does not come to its end.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_grad_norm: float = 1.0,
        schedule: LearningRateSchedule = "constant",
        warmup_steps: int = 0,
        total_steps: int = 1,
        shards: Shards | None = None,
    ) -> None:
        self.shards = shards = shards or Shards()
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        whole_model = len(self._parameters) == len(list(model.parameters()))
        self.sums = GradientSums(model) if shards.hooks and whole_model else None
        self.masters = {name: shards.local(p).to(torch.float32, copy=True) for name, p in self._parameters.items()}
        self.whole_shapes = {name: shards.whole_shape(name, p) for name, p in self._parameters.items()}
        self.lr, self.max_grad_norm = lr, max_grad_norm
        self.schedule, self.warmup_steps, self.total_steps = schedule, warmup_steps, total_steps
        self.steps = 0
        self.sound = True
        groups = [
            {"params": [m for m in self.masters.values() if m.dim() >= 2], "weight_decay": weight_decay},
            {"params": [m for m in self.masters.values() if m.dim() < 2], "weight_decay": 0.0},
        ]
        # fused: one pass over each tensor, elementwise, so its result depends neither on threads nor on grouping.
        self._adamw = torch.optim.AdamW([g for g in groups if g["params"]], lr=lr, betas=betas, eps=eps, fused=True)
        if shards.hooks:
            for name, parameter in self._parameters.items():
                parameter.register_post_accumulate_grad_hook(self._collector(name))

    def _collector(self, name: str) -> Any:
        return lambda _: self._collect(name)

    def _collect(self, name: str) -> None:
        master, parameter = self.masters[name], self._parameters[name]
        if parameter.grad is None:
            return
        gradient = self.shards.local(parameter.grad)
        if master.grad is None:
            master.grad = gradient.to(torch.float32, copy=True)
        else:
            master.grad += gradient
        parameter.grad = None  # its float32 sum lives with the master

    def collect(self) -> None:
        """Add what a backward pass left on the parameters. Call it after each; where hooks do so, it finds nothing."""
        for name in self._parameters:
            self._collect(name)

    def _take_sums(self) -> None:
        for name, gradient in (self.sums.take() if self.sums is not None else {}).items():
            master = self.masters[name]
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)

    def gradients(self) -> dict[str, Tensor | None]:
        """The float32 gradient summed so far for each parameter, None where there is none."""
        self._take_sums()
        return {name: master.grad for name, master in self.masters.items()}

    def zero_grad(self) -> None:
        """Forget the gradients summed so far, and what a backward pass that was broken off left on the parameters."""
        self._take_sums()
        for name, master in self.masters.items():
            master.grad = self._parameters[name].grad = None

    @torch.no_grad()
    def step(self) -> StepReport:
        """Apply the summed gradients to the masters and forget them. The model's parameters stay as they are.

        Whatever is raised before the masters are touched leaves `sound` true: the gradients can be dropped.

        Raises:
            NonFiniteError: a gradient or, after the step, a weight is NaN or infinite; names the first such parameter.
            RuntimeError: a parameter received no gradient, so it would silently stay what it is.
        """
        self.collect()
        gradients = {name: gradient for name, gradient in self.gradients().items() if gradient is not None}
        without = [name for name in self.masters if name not in gradients]
        if without:
            raise RuntimeError(f"no gradient reached {len(without)} of {len(self.masters)} parameters, first {without[0]}")
        self.shards.complete(gradients)
        norms = self.shards.norms(gradients)
        self._refuse_non_finite(norms, "the gradient of")
        total = torch.linalg.vector_norm(norms)
        grad_norm = float(total)
        if self.max_grad_norm > 0 and grad_norm > self.max_grad_norm:
            for gradient in gradients.values():
                gradient *= self.max_grad_norm / (total + 1e-6)
        lr = self.lr * learning_rate_factor(self.steps, self.schedule, self.warmup_steps, self.total_steps)
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._make_moments()
        self.sound = False
        self._adamw.step()
        self.zero_grad()
        self.steps += 1
        self._refuse_non_finite(self.shards.norms(self.masters), "the weight")
        self.sound = True
        return StepReport(grad_norm=grad_norm, lr=lr)

    def _make_moments(self) -> None:
        """Take the memory of the moments before the first step changes a master: AdamW would do so group by group."""
        for master in self.masters.values():
            if not self._adamw.state[master]:
                self._adamw.state[master] = {
                    "step": torch.zeros((), dtype=torch.float32, device=master.device),
                    "exp_avg": torch.zeros_like(master),
                    "exp_avg_sq": torch.zeros_like(master),
                }

    def _refuse_non_finite(self, norms: Tensor, what: str) -> None:
        if not bool(torch.isfinite(norms).all()):
            bad = [name for name, ok in zip(self.masters, torch.isfinite(norms).tolist(), strict=True) if not ok]
            raise NonFiniteError(
                f"{what} {bad[0]} (and {len(bad) - 1} more) is NaN or infinite at optimizer step {self.steps}; "
                + _REMEDIES[self.sound]
            )

    @torch.no_grad()
    def write_weights(self) -> None:
        """Round the masters into the model's parameters, wherever their memory is now."""
        # One launch for many tensors: an inference server may be standing still meanwhile.
        torch._foreach_copy_(
            [self.shards.local(parameter) for parameter in self._parameters.values()],
            [self.masters[name] for name in self._parameters],
        )

    def state_dict(self) -> dict[str, Tensor]:
        """Everything that the next step depends on but `steps`: masters and both moments, by parameter (float32, no copies)."""
        state: dict[str, Tensor] = {}
        for name, master in self.masters.items():
            moments = self._adamw.state.get(master, {})
            state[f"master.{name}"] = master
            for key in ("exp_avg", "exp_avg_sq"):
                state[f"{key}.{name}"] = moments[key] if key in moments else torch.zeros_like(master)
        return state

    def whole_masters(self) -> Iterator[tuple[str, Tensor]]:
        """The masters of the whole model, one at a time. Collective: every rank takes all of them."""
        return ((name, self.shards.whole(name, master)) for name, master in self.masters.items())

    def whole_state(self) -> Iterator[tuple[str, Tensor]]:
        """`state_dict` of the whole model, one tensor at a time. Collective: every rank takes all of them."""
        for key, tensor in self.state_dict().items():
            yield key, self.shards.whole(key.partition(".")[2], tensor)

    def whole_state_shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of what `whole_state` yields, in its order; nothing is sent."""
        return {key: self.whole_shapes[key.partition(".")[2]] for key in self.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor], steps: int) -> None:
        """Continue from `state`, what `whole_state` gave after `steps` steps, whatever the number of ranks was.

        Raises:
            CheckpointError: it belongs to another model.
        """
        expected = self.whole_state_shapes()
        found = {key: tuple(tensor.shape) for key, tensor in state.items()}
        if expected != found:
            different = sorted(key for key in expected.keys() | found.keys() if expected.get(key) != found.get(key))
            raise CheckpointError(
                f"the optimizer state is of another model: {len(different)} tensors differ, first {different[0]}"
            )
        for name, master in self.masters.items():
            parts = {
                key: self.shards.take(name, state[f"{key}.{name}"]).to(master.device, copy=True)
                for key in ("master", "exp_avg", "exp_avg_sq")
            }
            master.copy_(parts.pop("master"))
            self._adamw.state[master] = {
                "step": torch.tensor(float(steps), dtype=torch.float32, device=master.device),
                **parts,
            }
        self.steps = steps


def make_optimizer(config: TrainerConfig, model: Decoder) -> MasterAdamW:
    """The optimizer that the options describe, with masters of the model's present weights; gradients are added to its sums."""
    optimizer = MasterAdamW(
        model,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.adam_eps,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
        schedule=config.lr_schedule,
        warmup_steps=config.warmup_steps,
        total_steps=config.training_steps,
        shards=model.shards,
    )
    model.arithmetic.sums = optimizer.sums
    return optimizer
