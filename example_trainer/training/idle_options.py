"""Options that were given and do nothing in a run, because another one switches off what they are
of.

They are no error: `--correction none` on the command line must do for a file that sets a correction
up. But nobody should take them for what the run does.
"""

from __future__ import annotations

from example_trainer.algorithm.functions import is_import
from example_trainer.algorithm.objective import Objective
from example_trainer.config import TrainerConfig
from example_trainer.options.section import flag_of

_BOUNDS = ("clip_eps", "clip_eps_high", "dual_clip")


def idle_options(config: TrainerConfig, objective: Objective) -> list[str]:
    """One line for each reason, naming the flags that do nothing for it.

    Args:
        objective: that of the options.
    """
    advantages = config.method.advantages
    off = {
        f"--advantages is {advantages}": ("advantage_beta",) if advantages != "exponential" else (),
        f"--kl-coef is {config.kl_coef:g}": (
            ("kl_in", "reference_model", "ref_logprobs_from_workers") if not config.kl_coef else ()
        ),
        f"--distill-coef is {config.distill_coef:g}": ("distill_in",)
        if not config.distill_coef
        else (),
        f"--truncated-answers is {config.truncated_answers}": (
            ("overlong_buffer", "overlong_penalty")
            if config.truncated_answers != "penalise"
            else ()
        ),
        f"--correction is {config.correction}": (
            *(("correction_high", "correction_low") if config.correction == "none" else ()),
            *(("correction_ratio",) if not objective.correction.active else ()),
        ),
    }
    if objective.correction.corrects_present and not is_import(objective.name):
        off[
            f"with --correction-ratio now and --correction {config.correction} the correction has the whole ratio, and the "
            "loss's is 1; they act with --correction-ratio proximal and several updates (--minibatches, --ppo-epochs)"
        ] = _BOUNDS
    elif objective.ratio_is_one(config.several_updates) and not is_import(objective.name):
        off[
            f"with --correction {config.correction} and one update of a batch the loss's ratio is 1; they act with several "
            "(--minibatches, --ppo-epochs), or on the ratio to the sampler with --correction none"
        ] = _BOUNDS
    notes = []
    for reason, names in off.items():
        given = [
            f"{flag_of(name)} {getattr(config, name)}" for name in names if _is_given(config, name)
        ]
        if given:
            notes.append(
                f"{' and '.join(given)} {'does' if len(given) == 1 else 'do'} nothing: {reason}"
            )
    return notes


def _is_given(config: TrainerConfig, name: str) -> bool:
    return name in config.model_fields_set and getattr(config, name) is not None
