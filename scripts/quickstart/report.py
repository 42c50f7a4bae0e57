"""Former path of the quick start's report, for programs that read a run's folder with it."""

from example_trainer.launcher.quickstart.report import changed_answer

__all__ = ["changed_answer"]
