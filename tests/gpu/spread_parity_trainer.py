"""ParityTrainer over several ranks, which torchrun starts: FSDP2, or split as vLLM's ranks hold the
model (--split) for a single copy.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence

import torch

from bench.gpu.comparing_trainer import Rollout
from bench.gpu.spread_trainer import SplitTrainer, SpreadTrainer, main
from tests.gpu.parity_trainer import ParityTrainer
from vllm_patching.batch_invariant.settings import enable_settings


class ShardedParityTrainer(ParityTrainer, SpreadTrainer):
    """FSDP2: each rank recomputes other tokens, with float32 masters that bf16 cannot hold."""

    deterministic = True

    def _recomputed(self, parts: Sequence[Sequence[Rollout]]) -> list[torch.Tensor]:
        """A pass of the model is collective: in the last one, some ranks repeat the last part."""
        assert self.model is not None
        ranks, own = self.ranks.world_size, []
        for first in range(0, len(parts), ranks):
            mine = parts[min(first + self.ranks.rank, len(parts) - 1)]
            own.append(self._logprobs(mine).cpu().tolist())
            self.model.shards.release(self.model)
        rows = self.ranks.gather(own, "gathering the logprobs")
        found = [rows[number % ranks][number // ranks] for number in range(len(parts))]
        return [torch.tensor(values, dtype=torch.float32) for values in found]


class SplitParityTrainer(ParityTrainer, SplitTrainer):
    """Tensor-parallel ranks: all of them recompute every token."""

    deterministic = True

    def _recomputed(self, parts: Sequence[Sequence[Rollout]]) -> list[torch.Tensor]:
        """Raises RuntimeError if the ranks do not have the same bits."""
        found = super()._recomputed(parts)
        digest = hashlib.sha256(torch.cat(found).numpy().tobytes()).hexdigest()
        if len(set(self.ranks.gather(digest, "comparing the ranks"))) > 1:
            raise RuntimeError("the ranks of the trainer computed different logprobs")
        return found


if __name__ == "__main__":
    kinds = {True: SplitParityTrainer, False: ShardedParityTrainer}
    main(kinds["--split" in sys.argv], enable_settings)
