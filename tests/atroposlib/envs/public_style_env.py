"""An environment as people write them for the public interface: only public names, nothing of ours.

One response per call to `collect_trajectory`, through the chat interface and
`tokenize_for_trainer`. Conversations of two turns go through a managed server when `two_turns` is
set. It has metrics, evaluation and checkpoints by overriding the usual methods.
"""

import contextlib
import random
import time
from typing import Any

from atroposlib.envs.server_handling.server_manager import ServerBaseline
from atroposlib.utils.tokenize_for_trainer import tokenize_for_trainer
from pydantic import Field

from atroposlib.envs.base import (
    APIServerConfig,
    BaseEnv,
    BaseEnvConfig,
    ScoredDataGroup,
    ScoredDataItem,
)
from atroposlib.type_definitions import Item, Message


class SumsConfig(BaseEnvConfig):
    two_turns: bool = Field(default=False, description="Ask for a second look at the answer")


class SumsEnv(BaseEnv):
    name = "sums"
    env_config_cls = SumsConfig

    def __init__(
        self,
        config: SumsConfig,
        server_configs: ServerBaseline | list[APIServerConfig],
        slurm=True,
        testing=False,
    ):
        super().__init__(config, server_configs, slurm=False, testing=testing)
        self.percent_correct_buffer = list()
        self.eval_metrics = list()
        self.seen = 0

    @classmethod
    def config_init(cls) -> tuple[SumsConfig, list[APIServerConfig]]:
        env_config = SumsConfig(
            tokenizer_name="set-by-flag",
            group_size=4,
            use_wandb=False,
            rollout_server_url="http://localhost:8000",
            total_steps=50,
            batch_size=12,
            steps_per_eval=2,
            max_token_length=64,
            inference_weight=1.0,
            wandb_name="sums",
            min_items_sent_before_logging=1,
        )
        server_configs = [
            APIServerConfig(
                model_name="default",
                base_url="http://localhost:9001/v1",
                api_key="x",
                num_requests_for_eval=16,
                server_type="vllm",
            )
        ]
        return env_config, server_configs

    async def setup(self):
        self.rng = random.Random(0)
        self.test = [(n, n + 1) for n in range(10, 20)]

    async def wandb_log(self, wandb_metrics: dict | None = None):
        if wandb_metrics is None:
            wandb_metrics = {}
        with contextlib.suppress(ZeroDivisionError):
            wandb_metrics["train/percent_correct"] = sum(self.percent_correct_buffer) / len(
                self.percent_correct_buffer
            )
        self.percent_correct_buffer = list()
        for name, value in self.eval_metrics:
            wandb_metrics[name] = value
        self.eval_metrics = list()
        await super().wandb_log(wandb_metrics)

    def save_checkpoint(self, step, data=None):
        super().save_checkpoint(step, {"seen": self.seen})

    async def get_next_item(self) -> Item:
        self.seen += 1
        return self.rng.randint(10, 99), self.rng.randint(10, 99)

    def ask(self, item) -> list[Message]:
        return [Message(role="user", content=f"What is {item[0]} plus {item[1]}?")]

    def is_right(self, item, text) -> bool:
        return f"\\boxed{{{item[0] + item[1]}}}" in text

    async def collect_trajectory(
        self, item: Item
    ) -> tuple[ScoredDataItem | Any | None, list[Item]]:
        messages = self.ask(item)
        answer = await self.server.chat_completion(
            messages=messages, n=1, max_tokens=self.config.max_token_length
        )
        choice = answer.choices[0]
        messages.append(Message(role="assistant", content=choice.message.content))
        row = tokenize_for_trainer(self.tokenizer, messages, finish_reason=choice.finish_reason)
        right = self.is_right(item, choice.message.content)
        self.percent_correct_buffer.append(right)
        return ScoredDataItem(
            tokens=row["tokens"],
            masks=row["masks"],
            scores=1.0 if right else -1.0,
            messages=messages,
        ), []

    async def collect_trajectories(self, item: Item):
        if not self.config.two_turns:
            return await super().collect_trajectories(item)
        scores = ScoredDataGroup()
        scores["tokens"], scores["masks"], scores["scores"], scores["inference_logprobs"] = (
            [],
            [],
            [],
            [],
        )
        for _ in range(self.config.group_size):
            async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
                messages = self.ask(item)
                for follow_up in ("Are you sure?", None):
                    completion = await managed.chat_completion(
                        messages=messages, n=1, max_tokens=64, temperature=1.0
                    )
                    messages.append(
                        {"role": "assistant", "content": completion.choices[0].message.content}
                    )
                    if follow_up:
                        messages.append(
                            {
                                "role": "user",
                                "content": f"{follow_up} What is {item[0]} plus {item[1]}?",
                            }
                        )
                node = managed.get_state()["nodes"][0]
            scores["tokens"].append(node.tokens)
            scores["masks"].append(node.masked_tokens)
            scores["inference_logprobs"].append(node.logprobs)
            scores["scores"].append(1.0 if self.is_right(item, messages[-1]["content"]) else -1.0)
        if len(set(scores["scores"])) == 1:
            return None, []
        return scores, []

    async def evaluate(self, *args, **kwargs):
        start = time.time()
        samples = []
        for item in self.test:
            answer = await self.server.chat_completion(
                messages=self.ask(item), n=1, temperature=0.0, split="eval"
            )
            text = answer.choices[0].message.content
            samples.append({"question": str(item), "correct": self.is_right(item, text)})
        right = sum(sample["correct"] for sample in samples) / len(samples)
        self.eval_metrics.append(("eval/percent_correct", right))
        await self.evaluate_log(
            metrics={"eval/percent_correct": right},
            samples=samples,
            start_time=start,
            end_time=time.time(),
            generation_parameters={"temperature": 0.0},
        )


if __name__ == "__main__":
    SumsEnv.cli()
