"""The last step's figures for Prometheus: GET http://<trainer>:<--metrics-port>/metrics."""

from __future__ import annotations

import math
import socket
import sys
import threading
import time
from collections.abc import Mapping
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import WSGIApplication

from prometheus_client import CollectorRegistry, Counter, Gauge, make_wsgi_app

from example_trainer.batch.evaluations import Evaluation
from example_trainer.batch.reader import safe_name
from example_trainer.errors import ConfigError

# A small HTTP server for figures whose clients cannot use up the threads and open files of the
# trainer.

MOST_CONNECTIONS = 32
"""Connections at a time. One more ends the oldest."""
READ_SECONDS = 10.0
"""A connection that sends nothing for so long is closed."""


class _Handler(WSGIRequestHandler):
    timeout = READ_SECONDS

    def log_message(self, format: str, *args: Any) -> None:
        """Log no requests."""


class BoundedWSGIServer(ThreadingMixIn, WSGIServer):
    """Serves a WSGI application from threads.

    Args:
        host: name or address to listen on.
        port: 0 for any free one.

    Raises:
        OSError: the port is taken, or the address is none of this machine.
    """

    daemon_threads = True
    request_queue_size = 4 * MOST_CONNECTIONS

    def __init__(self, host: str, port: int, application: WSGIApplication) -> None:
        family, *_, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        self.address_family = family
        self.connections: dict[socket.socket, None] = {}
        """In the order in which they came."""
        self._lock = threading.Lock()
        super().__init__((str(address[0]), int(address[1])), _Handler)
        self.set_app(application)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection in a thread, and end the oldest one if there are too many."""
        with self._lock:
            self.connections[request] = None
            oldest = (
                next(iter(self.connections)) if len(self.connections) > MOST_CONNECTIONS else None
            )
            if oldest is not None:
                del self.connections[oldest]
        if oldest is not None:
            try:
                oldest.shutdown(socket.SHUT_RDWR)
            except OSError:  # its client has closed it
                self._forget(oldest)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        self._forget(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Leave out what clients cause: silence, and connections that end."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)

    def _forget(self, request: socket.socket) -> None:
        with self._lock:
            self.connections.pop(request, None)


GAUGES = {
    "reward_mean": ("reward_mean", "Mean score of the step's sequences"),
    "success_rate": (
        "success_rate",
        "Share of the step's sequences that solved their item, among sequences with a known "
        "success",
    ),
    "reward_std": ("reward_std", "Standard deviation of the step's scores"),
    "loss": ("loss", "Loss of the step"),
    "kl": ("kl_nats", "KL divergence from the rollout policy, k3 estimate"),
    "reference_kl": ("reference_kl_nats", "KL divergence from the reference model, k3 estimate"),
    "entropy": ("entropy_nats", "Entropy where the trained tokens were chosen"),
    "clip_fraction": (
        "clip_fraction",
        "Share of the tokens whose gradient was stopped by clipping",
    ),
    "clip_fraction_low": (
        "clip_fraction_low",
        "Share of the tokens whose gradient was stopped because the ratio fell",
    ),
    "clip_fraction_high": (
        "clip_fraction_high",
        "Share of the tokens whose gradient was stopped because the ratio rose",
    ),
    "missing_rollout_logprobs": (
        "missing_rollout_logprobs",
        "Share of the tokens that came without a rollout logprob",
    ),
    "teacher_kl": ("teacher_kl_nats", "Divergence from the teacher"),
    "mismatch_kl": (
        "mismatch_kl_nats",
        "KL divergence of sampler and trainer at equal weights, k3 estimate",
    ),
    "drift_share": (
        "drift_share",
        "Share of the batch's tokens that the figures of trainer by sampler are of",
    ),
    "ratio_mean": ("ratio_mean", "Mean ratio trainer by sampler of the sampled tokens"),
    "ratio_max": ("ratio_max", "Largest ratio trainer by sampler"),
    "ratio_p01": ("ratio_p01", "1st percentile of the ratio trainer by sampler"),
    "ratio_p50": ("ratio_p50", "Median ratio trainer by sampler"),
    "ratio_p95": ("ratio_p95", "95th percentile of the ratio trainer by sampler"),
    "ratio_p99": ("ratio_p99", "99th percentile of the ratio trainer by sampler"),
    "ess": ("effective_sample_share", "Kish's effective sample size of the ratios, by the tokens"),
    "correction_weight": (
        "correction_weight_mean",
        "Mean weight of the correction, 0 for what is left out",
    ),
    "correction_ess": (
        "correction_effective_sample_share",
        "Kish's effective sample size of the correction's weights",
    ),
    "correction_masked": (
        "correction_masked_share",
        "Share of the tokens that the correction left out",
    ),
    "correction_masked_sequences": (
        "correction_masked_sequences_share",
        "Share of the sequences that it left out whole",
    ),
    "correction_bounded": (
        "correction_bounded_share",
        "Share of the tokens whose weight was the correction's bound",
    ),
    "perplexity_rollout": (
        "rollout_perplexity",
        "Perplexity of the sampled tokens under the sampler",
    ),
    "perplexity_trainer": (
        "trainer_perplexity",
        "Perplexity of the sampled tokens under the batch's first weights",
    ),
    "expert_load": (
        "expert_load",
        "Tokens of a layer's busiest expert by the layer's mean, mean over the layers",
    ),
    "expert_load_max": ("expert_load_max", "The same of the layer where it is largest"),
    "unused_experts": ("unused_experts", "Experts of all layers that got no token in the step"),
    "router_entropy": ("router_entropy_nats", "Mean entropy of the routers' probabilities"),
    "router_balance_loss": (
        "router_balance_loss",
        "Load balance loss, mean over the layers; 1 if the load is even",
    ),
    "router_z_loss": ("router_z_loss", "Mean square of the logarithm of the routers' partition"),
    "rerouted_share": (
        "rerouted_ratio",
        "Share of replayed tokens and layers for which the trainer's router would choose other experts",
    ),
    "grad_norm": ("grad_norm", "Global norm of the gradient before clipping"),
    "lr": ("learning_rate", "Learning rate of the step"),
    "tokens_per_second": (
        "tokens_per_second",
        "Trained tokens that were forwarded by the step's whole duration",
    ),
    "forwarded_tokens_per_second": (
        "forwarded_tokens_per_second",
        "Forwarded tokens by the time of computing the step",
    ),
    "packing_ratio": (
        "packing_ratio",
        "Forwarded tokens by the tokens of all sequences, which share what they begin with",
    ),
    "mfu": (
        "model_flops_utilisation",
        "The model's arithmetic by the time of computing the step and the device's rate",
    ),
    "peak_memory_bytes": (
        "peak_memory_bytes",
        "Most bytes of tensors on the GPU in the step; of the process on a CPU",
    ),
    "waiting_share": ("waiting_share", "Share of the step in which it waited for its batch"),
    "response_length_mean": ("response_length_mean_tokens", "Mean length of the responses"),
    "response_length_p50": ("response_length_p50_tokens", "Median length of the responses"),
    "response_length_p95": (
        "response_length_p95_tokens",
        "95th percentile of the responses' lengths",
    ),
    "response_length_max": ("response_length_max_tokens", "Length of the longest response"),
    "truncated_share": ("truncated_share", "Share of the responses that ran into their limit"),
    "zero_advantage_share": (
        "zero_advantage_share",
        "Share of the trained sequences whose advantages are all 0",
    ),
    "queue_size": ("queue_groups", "Groups that waited in the rollout service after the step"),
    "age_mean": ("staleness_mean_versions", "Mean age of what was trained on, in weight versions"),
    "age_max": (
        "staleness_max_versions",
        "Greatest age of what was trained on, in weight versions",
    ),
    "uses_mean": ("uses_mean", "Batches in which a group of the batch had been trained on before"),
    "weight_version": ("served_weight_version", "Weight version that the inference server serves"),
    "seconds_wait": ("wait_seconds", "Seconds that the step waited for its batch"),
    "seconds_train": ("train_seconds", "Seconds of forward, backward and optimizer"),
    "seconds_sync": ("sync_seconds", "Seconds of handing over the weights"),
}
"""Key of a row of metrics.jsonl -> (name after `lockstep_trainer_`, help)."""
COUNTERS = {
    "forwarded_targets": ("tokens", "Trained tokens that were forwarded since this process began"),
    "forwarded_tokens": ("forwarded_tokens", "Tokens forwarded since this process began"),
    "flops": ("flops", "Operations of forward and backward passes since this process began"),
    "sequences": ("sequences", "Sequences trained on since this process began"),
    "sequences_too_long": (
        "sequences_too_long",
        "Sequences above the length limit since this process began",
    ),
    "groups_invalid": (
        "groups_invalid",
        "Groups that were left out of their batch since this process began",
    ),
    "updates": ("updates", "Optimizer updates since this process began"),
    "updates_skipped": (
        "updates_skipped",
        "Updates of batches that could not be taken since this process began",
    ),
    "batches_skipped": (
        "batches_skipped",
        "Batches that could not be trained on since this process began",
    ),
    "compared_tokens": (
        "compared_tokens",
        "Tokens of the present weights that deterministic mode compared since this process began",
    ),
    "mismatched_tokens": (
        "mismatched_tokens",
        "Compared tokens whose bits differ since this process began",
    ),
    "older_tokens": (
        "older_tokens",
        "Tokens of older weights, compared with nothing, since this process began",
    ),
    "bytes_moved": (
        "weight_bytes_sent",
        "Bytes of weights sent to the inference server since this process began",
    ),
}
_PREFIX = "lockstep_trainer_"
LABELLED = {
    "sync/": ("sync_phase_seconds", "Seconds of a phase of the last handing over", "phase"),
    "fleet/": (
        "fleet_servers",
        "vLLM servers after the last update, by standing; size: all of them",
        "standing",
    ),
    "reward/": (
        "environment_reward_mean",
        "Mean score of the step's sequences of an environment",
        "environment",
    ),
    "success/": ("environment_success_rate", "success_rate of an environment", "environment"),
    "kl_age_": (
        "kl_by_age_nats",
        "KL divergence from the rollout policy, by the age of what was sampled",
        "age",
    ),
}
"""Beginning of keys of a row -> (name after `lockstep_trainer_`, help, label, whose value is the
rest of the key)."""


class MetricsServer:
    """Answers Prometheus from a thread of its own, with what `update` was last given."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        """Listen on a port of the address; every client that reaches it may read the figures, and nothing
        else.

        Raises:
            ConfigError: the port is taken, or the address is none of this machine.
        """
        self.registry = CollectorRegistry()
        self._step = Gauge(f"{_PREFIX}step", "Optimizer steps taken", registry=self.registry)
        self._at = Gauge(
            f"{_PREFIX}step_timestamp_seconds",
            "Unix time of the last step's end",
            registry=self.registry,
        )
        self._gauges = {
            key: Gauge(_PREFIX + name, text, registry=self.registry)
            for key, (name, text) in GAUGES.items()
        }
        self._counters = {
            key: Counter(_PREFIX + name, text, registry=self.registry)
            for key, (name, text) in COUNTERS.items()
        }
        self._labelled = {
            beginning: Gauge(_PREFIX + name, text, [label], registry=self.registry)
            for beginning, (name, text, label) in LABELLED.items()
        }
        self._evaluation = Gauge(
            f"{_PREFIX}evaluation", "Last evaluation that an environment reported", ["environment", "metric"],
            registry=self.registry,
        )  # fmt: skip
        self._evaluated = Gauge(
            f"{_PREFIX}evaluated_weight_version", "Weight version of the last evaluation", ["environment"],
            registry=self.registry,
        )  # fmt: skip
        try:
            self.http = BoundedWSGIServer(host, port, make_wsgi_app(self.registry))
        except OSError as error:
            raise ConfigError(
                f"--metrics-port {port} on --metrics-host {host}: {error.strerror or error}; give "
                "a port that no program listens "
                "on (`ss -ltn` lists them), or 0"
            ) from error
        self._thread = threading.Thread(target=self.http.serve_forever, name="figures", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.http.server_port)

    def update(self, step: int, row: Mapping[str, Any]) -> None:
        """Show a row of metrics.jsonl.

        A figure that is not known becomes NaN rather than the last one that was.
        """
        self._step.set(step)
        self._at.set(time.time())
        for key, gauge in self._gauges.items():
            gauge.set(_number(row.get(key)))
        for key, counter in self._counters.items():
            counter.inc(row.get(key) or 0)
        for beginning, gauge in self._labelled.items():
            gauge.clear()
            for key, value in row.items():
                if key.startswith(beginning) and value is not None:
                    gauge.labels(key.removeprefix(beginning)).set(value)

    def update_evaluation(self, evaluation: Evaluation) -> None:
        """Show an evaluation, in place of an earlier one of that name."""
        name = safe_name(evaluation.name)
        for metric, value in evaluation.metrics.items():
            self._evaluation.labels(name, metric).set(value)
        self._evaluated.labels(name).set(_number(evaluation.weight_version))

    def close(self) -> None:
        """Stop listening."""
        self.http.shutdown()
        self.http.server_close()
        self._thread.join(timeout=5)


def _number(value: float | None) -> float:
    """NaN for an unknown figure."""
    return math.nan if value is None else value


def serve_metrics(port: int, host: str = "127.0.0.1") -> MetricsServer | None:
    """The server for --metrics-port and --metrics-host; none for port 0.

    Raises:
        ConfigError: the port is taken, or the address is none of this machine.
    """
    if not port:
        return None
    return MetricsServer(port, host)
