"""Where rollouts come from, and how many make a batch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, SecretStr

from atroposlib.web.addresses import HttpAddress
from example_trainer.api_keys import from_variable
from example_trainer.options.section import Section


class RolloutOptions(Section):
    """Rollouts"""

    atropos_url: HttpAddress = Field("http://localhost:8000", description="rollout service")
    atropos_api_key: SecretStr | None = Field(
        default_factory=from_variable("atropos_api_key"),
        description="bearer token of the rollout service; better as a variable, which other users cannot see",
    )
    service_timeout: float = Field(
        300.0,
        gt=0,
        description="seconds to wait for the rollout service to be there, or to come back",
    )
    batch_timeout: float = Field(
        1800.0, gt=0, description="seconds to wait for one batch of rollouts"
    )
    max_staleness: int | None = Field(
        None,
        ge=0,
        description="oldest rollouts to train on, in weight versions; not given: any, with --deterministic 0",
    )
    replay: Literal["fifo", "recent", "uniform"] = Field(
        "fifo",
        description="which waiting rollouts are trained on first: the oldest, those of the newest weights, or any (by --seed); "
        "recent and uniform need --max-staleness",
    )
    max_reuse: int = Field(
        1,
        ge=1,
        le=1024,
        description="batches in which a group of rollouts may be trained on; above 1 it needs --max-staleness 1 or more, and a "
        "--correction",
    )
    max_skipped_batches: int = Field(
        3,
        ge=0,
        description="batches in a row that may hold nothing to train on or run out of memory; one more ends the run",
    )
    skip_nonfinite: int = Field(
        0,
        ge=0,
        description="batches in a row whose gradient may be NaN or infinite and is left out; one more ends the run",
    )


class BatchOptions(Section):
    """Batches"""

    training_steps: int = Field(
        10, ge=1, description="optimizer steps in all, those before a resume included"
    )
    batch_size: int = Field(
        2,
        ge=1,
        description="sequences of an optimizer step, divided by --gradient-accumulation-steps",
    )
    gradient_accumulation_steps: int = Field(
        32,
        ge=1,
        description="sequences of an optimizer step, divided by --batch-size",
    )
    seq_len: int = Field(
        2048,
        ge=2,
        description="longest sequence in tokens, prompt included; the environments get it too",
    )
    tokens_per_microbatch: int | None = Field(
        None,
        ge=1,
        description="tokens of one forward and backward pass, a longer sequence alone excepted; not given: what memory allows",
    )
    share_prefixes: bool | None = Field(
        None,
        description="forward what rollouts of a group begin with once for all of them; not given: unless --deterministic",
    )

    @property
    def sequences_per_step(self) -> int:
        """Sequences in the batch that one optimizer step trains on."""
        return self.batch_size * self.gradient_accumulation_steps
