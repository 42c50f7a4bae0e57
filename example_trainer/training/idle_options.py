"""Options that were given and do nothing in a run, because another one switches off what they are
of.

They are not an error: `--correction none` on the command line must do for a file that sets a correction
up. But the log names them.
"""

from __future__ import annotations

from example_trainer.algorithm.advantages import is_import
from example_trainer.algorithm.objective import Objective
from example_trainer.config import TrainerConfig, flag_of

_BOUNDS = ("clip_eps", "clip_eps_high", "dual_clip")


def idle_options(config: TrainerConfig, objective: Objective) -> list[str]:
    """One line for each reason, naming the flags that do nothing for it.

    Args:
        objective: that of the options.
    """
    correction, advantages = objective.correction, config.method.advantages
    own_loss = is_import(objective.name)
    corrects_present = correction.corrects_present and not own_loss
    ratio_is_one = objective.ratio_is_one(config.several_updates) and not own_loss
    penalises = config.truncated_answers == "penalise"
    rows = (
        (advantages != "exponential", f"--advantages is {advantages}", ("advantage_beta",)),
        (
            not config.kl_coef,
            f"--kl-coef is {config.kl_coef:g}",
            ("kl_in", "reference_model", "ref_logprobs_from_workers"),
        ),
        (
            config.lora is None,
            f"--weight-bridge-mode is {config.weight_bridge_mode}",
            ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules"),
        ),
        (not config.distill_coef, f"--distill-coef is {config.distill_coef:g}", ("distill_in",)),
        (
            not penalises,
            f"--truncated-answers is {config.truncated_answers}",
            ("overlong_buffer", "overlong_penalty"),
        ),
        (
            config.correction == "none",
            f"--correction is {config.correction}",
            ("correction_high", "correction_low"),
        ),
        (not correction.active, f"--correction is {config.correction}", ("correction_ratio",)),
        (
            corrects_present,
            f"with --correction-ratio now and --correction {config.correction} the correction has "
            "the whole ratio, and the loss's is 1. They act with --correction-ratio proximal and "
            "several updates (--minibatches, --ppo-epochs)",
            _BOUNDS,
        ),
        (
            ratio_is_one and not corrects_present,
            f"with --correction {config.correction} and one update of a batch the loss's ratio is "
            "1. They act with several (--minibatches, --ppo-epochs), or on the ratio to the "
            "sampler with --correction none",
            _BOUNDS,
        ),
    )
    flags: dict[str, list[str]] = {}
    for is_off, reason, names in rows:
        if is_off:
            flags.setdefault(reason, []).extend(
                f"{flag_of(name)} {getattr(config, name)}"
                for name in names
                if _is_given(config, name)
            )
    return [_note(words, reason) for reason, words in flags.items() if words]


def _note(words: list[str], reason: str) -> str:
    verb = "do"
    if len(words) == 1:
        verb = "does"
    return f"{' and '.join(words)} {verb} nothing: {reason}"


def _is_given(config: TrainerConfig, name: str) -> bool:
    return name in config.model_fields_set and getattr(config, name) is not None
