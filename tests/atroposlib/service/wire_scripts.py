"""Requests that the differential test plays at the public server and at ours, and where their
answers are meant to differ.

A step without `Differs` must get the same answer from both. A step with it must get exactly the two
answers that stand there, so that a change on either side is noticed. Answers are written as
`test_differential.brief` shortens them: a batch as the marks of its groups, a list of validation
errors as their places.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass, field
from typing import Any

from .conftest import environment, group, trainer


@dataclass(frozen=True)
class Differs:
    """Each side's answer, (status, brief content), and the entry of `test_differential.INTENDED`
    with the reason.
    """

    why: str
    public: tuple[int, Any]
    ours: tuple[int, Any]


@dataclass(frozen=True)
class Step:
    """One request; path RESTART kills both servers and starts them again."""

    method: str
    path: str
    content: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)
    differs: Differs | None = None


RESTART = Step("", "RESTART")
JSON = {"content-type": "application/json"}


def get(path: str, body: Any = None, differs: Differs | None = None, **headers: str) -> Step:
    content = None if body is None else json.dumps(body).encode()
    return Step("GET", path, content, {**(JSON if content else {}), **headers}, differs)


def post(path: str, body: Any, differs: Differs | None = None) -> Step:
    return Step(
        "POST", path, json.dumps(body).encode(), JSON, differs
    )  # unlike httpx, json writes NaN


def raw(path: str, content: bytes, differs: Differs | None = None, **headers: str) -> Step:
    return Step(
        "POST",
        path,
        content,
        {**JSON, **{k.replace("_", "-"): v for k, v in headers.items()}},
        differs,
    )


def data(differs: Differs | None = None, **fields: Any) -> Step:
    return post("/scored_data", group(**fields), differs)


def batch(why: str, public: Any, ours: Any) -> Step:
    return get("/batch", differs=Differs(why, (200, {"batch": public}), (200, {"batch": ours})))


def env_status(env_id: int) -> Step:
    return get("/status-env", {"env_id": env_id})


def info(batch_size: int, max_token_len: int) -> tuple[int, Any]:
    return 200, {"batch_size": batch_size, "max_token_len": max_token_len}


def status(current_step: int, queue_size: int) -> tuple[int, Any]:
    return 200, {"current_step": current_step, "queue_size": queue_size}


BATCH, STATUS, INFO, LATEST = get("/batch"), get("/status"), get("/info"), get("/latest_example")
FOREIGN = (403, {"detail": "the request comes from the Origin 'http://elsewhere'"})
RECEIVED = (200, {"status": "received"})
NO_TRAINER = (
    200,
    {"status": "error", "message": "Trainer not registered. Call /register first.", "batch": []},
)
WAIT = (200, {"status": "wait for trainer to start"})
CRASHED = (500, "Internal Server Error")


def unknown(env_id: int) -> str:
    return f"environment {env_id} is not registered here; POST /register-env to get an id"


def refused(*place: Any) -> tuple[int, Any]:
    return 422, [("body", *place)]


def begin(*environments: dict[str, Any], **fields: Any) -> list[Step]:
    """A trainer and its environments (by default one, with groups of 4)."""
    posts = [post("/register-env", entry) for entry in environments or [environment()]]
    return [post("/register", trainer(**fields)), BATCH, *posts]


def registered(step: int, num_steps: int) -> tuple[int, Any]:
    answer = {
        "status": "success",
        "env_id": 0,
        "wandb_name": "task_0",
        "checkpoint_dir": "checkpoints",
    }
    return 200, answer | {"starting_step": step, "checkpoint_interval": 5, "num_steps": num_steps}


BIG = group(length=60)
PACKED = gzip.compress(json.dumps(BIG).encode(), mtime=0)
HALVES = [
    gzip.compress(part, mtime=0)
    for part in (json.dumps(BIG).encode()[:500], json.dumps(BIG).encode()[500:])
]
OPTIONAL: dict[str, Any] = {
    "advantages": [[0.5] * 3] * 4,
    "ref_logprobs": [[-0.1] * 3] * 4,
    "messages": [[{"role": "user", "content": "é" * 100}]] * 4,
    "generation_params": {"temperature": 1.0},
    "overrides": [{"a": 1}] * 4,
    "group_overrides": {"b": 2},
    "images": ["aGk="] * 4,
    "env_id": 0,
    "distill_token_ids": [[[1, 2]] * 3] * 4,
    "distill_logprobs": [[[-1.0, -2.0]] * 3] * 4,
}
ROUTES = ("/register", "/register-env", "/disconnect-env", "/scored_data", "/scored_data_list")
BODIES = (
    b"",
    b"{",
    b"null",
    b"{}",
    b'"x"',
    b'{"env_id": "x", "tokens": "x", "batch_size": "x", "group_size": 1.5}',
)
WRONG_IDS: tuple[Any, ...] = (None, {}, [], "x", {"env_id": "x"}, {"env_id": None})

SCRIPTS: dict[str, list[Step]] = {
    "before anyone registered": [
        *(
            get(path)
            for path in ("/", "/info", "/wandb_info", "/status", "/batch", "/latest_example")
        ),
        get(
            "/status-env",
            {"env_id": 0},
            Differs("unknown environment", CRASHED, (404, {"detail": unknown(0)})),
        ),
        post("/register-env", environment()),
        post(
            "/disconnect-env",
            {"env_id": 0},
            Differs(
                "wording",
                (200, {"status": "failure", "error": "'State' object has no attribute 'envs'"}),
                (200, {"status": "failure", "error": unknown(0)}),
            ),
        ),
        *(get(path) for path in ("/nope", "/register", "/reset_data", "/batch", "/status")),
        post("/batch", {}),
        get(
            "/",
            differs=Differs("pages", (200, {"message": "AtroposLib API"}), FOREIGN),
            origin="http://elsewhere",
        ),
        Step(
            "OPTIONS",
            "/scored_data",
            headers={"origin": "http://elsewhere", "access-control-request-method": "POST"},
            differs=Differs("pages", (200, "OK"), FOREIGN),
        ),
        get(
            "/reset_data",
            differs=Differs("pages", (200, "Reset successful"), FOREIGN),
            origin="http://elsewhere",
        ),
    ],
    "a run": [
        post("/register", trainer(starting_step=3)),
        post("/register-env", environment()),
        *(INFO, get("/wandb_info"), STATUS, BATCH),
        post("/register-env", environment()),
        post("/register-env", environment(weight=3.0)),
        post(
            "/register-env",
            environment(desired_name="other", group_size=8, min_batch_allocation=0.5),
        ),
        *(env_status(env_id) for env_id in (0, 1, 2)),
        get(
            "/status-env",
            {"env_id": 9},
            Differs("unknown environment", CRASHED, (404, {"detail": unknown(9)})),
        ),
        post("/disconnect-env", {"env_id": 2}),
        post(
            "/disconnect-env",
            {"env_id": 9},
            Differs(
                "wording",
                (200, {"status": "failure", "error": "list index out of range"}),
                (200, {"status": "failure", "error": unknown(9)}),
            ),
        ),
        post(
            "/disconnect-env",
            {"env_id": -1},
            Differs(
                "unknown environment",
                (200, {"status": "success"}),
                (200, {"status": "failure", "error": unknown(-1)}),
            ),
        ),
        *(
            env_status(0),
            env_status(2),
            data(env_id=0, mark=1),
            STATUS,
            BATCH,
            LATEST,
            env_status(0),
            env_status(1),
        ),
        *(data(env_id=1, mark=2), BATCH, STATUS, BATCH, STATUS, env_status(0)),
        post("/register-env", environment()),
        post("/disconnect-env", {"env_id": 2}),
    ],
    "optional fields": [
        *begin(),
        *(data(**OPTIONAL), LATEST, data(**OPTIONAL), BATCH),
        *(data(advantages=[[1.0]] * 4), data(inference_logprobs=None, images="one"), LATEST, BATCH),
        data(later_field=1),
        get(
            "/latest_example",
            differs=Differs(
                "unknown fields", (200, {"example": 7}), (200, {"example": 7, "later_field": 1})
            ),
        ),
    ],
    "groups of other sizes": [
        *begin(),
        *(
            data(size=2, env_id=0, mark=1),
            STATUS,
            data(size=3, env_id=0, mark=2),
            data(size=2, env_id=0, mark=3),
        ),
        *(STATUS, env_status(0), data(size=1, env_id=0, mark=4), STATUS, env_status(0)),
        *(data(size=2, env_id=77), data(size=2), STATUS),
        batch("packing", None, [1, 3, 7, 7]),
    ],
    "a buffer": [
        *begin(),
        post("/scored_data_list", [group(3, env_id=0), group(4, env_id=0)]),
        data(size=3, env_id=0),
        data(
            Differs(
                "stuck buffer",
                (200, {"status": "buffered", "buffer_size": 14}),
                (200, {"status": "buffered", "buffer_size": 6}),
            ),
            size=8,
            env_id=0,
        ),
        get("/status", differs=Differs("stuck buffer", status(0, 1), status(0, 2))),
    ],
    "sizes of several environments": [
        *begin(environment(group_size=3), environment(), environment(group_size=8), batch_size=48),
        *(
            step
            for _ in range(5)
            for step in (data(size=3, env_id=0), *(env_status(env_id) for env_id in range(3)))
        ),
        data(size=8, env_id=2),
        env_status(0),
        get(
            "/status-env",
            {"env_id": 1},
            Differs(
                "mixed sizes",
                (200, {"queue_size": 6, "self_queue_size": 0}),
                (200, {"queue_size": 5, "self_queue_size": 0}),
            ),
        ),
        get(
            "/status-env",
            {"env_id": 2},
            Differs(
                "mixed sizes",
                (200, {"queue_size": 3, "self_queue_size": 1}),
                (200, {"queue_size": 2, "self_queue_size": 1}),
            ),
        ),
    ],
    "packing": [
        *begin(environment(), environment(group_size=8), batch_size=12),
        *(
            data(size=8, mark=1, env_id=1),
            data(size=8, mark=2, env_id=1),
            BATCH,
            data(mark=3, env_id=0),
        ),
        batch("packing", None, [1, 3]),
    ],
    "what stock environments send": [
        *begin(environment(weight=-1)),
        *(data(env_id=0, mark=1, advantages=[], ref_logprobs=[]), STATUS, data(env_id=0, mark=2)),
    ],
    "nothing to learn": [
        *begin(),
        data(Differs("nothing to learn", RECEIVED, refused("masks")), masks=[[-100] * 3] * 4),
        data(Differs("nothing to learn", RECEIVED, refused("tokens")), tokens=[[7, -7, 7]] * 4),
        get("/status", differs=Differs("nothing to learn", status(0, 2), status(0, 0))),
    ],
    "lists": [
        *begin(),
        *(
            post("/scored_data_list", body)
            for body in ([], [group(mark=1), group(mark=2)], [group(), {"tokens": [[1]]}])
        ),
        *(
            post("/scored_data_list", group()),
            post("/scored_data", [group()]),
            STATUS,
            LATEST,
            BATCH,
            STATUS,
        ),
    ],
    "gzip": [
        *begin(),
        *(
            raw("/scored_data", body, content_encoding="gzip")
            for body in (PACKED, b"no gzip", gzip.compress(b'{"to'), b"")
        ),
        *(
            raw("/scored_data", body, content_encoding="gzip")
            for body in (b"".join(HALVES), PACKED + bytes(8), PACKED + b"x")
        ),
        raw(
            "/scored_data",
            PACKED[:-20],
            Differs("truncated gzip", CRASHED, (400, "Invalid gzip payload")),
            content_encoding="gzip",
        ),
        raw("/scored_data", PACKED, content_encoding="GZIP"),
        *(STATUS, LATEST, get("/latest_example", accept_encoding="identity"), BATCH),
        raw(
            "/scored_data",
            json.dumps(BIG).encode(),
            Differs(
                "unknown encoding",
                RECEIVED,
                (415, {"detail": "Content-Encoding 'br' is not understood; send gzip or none"}),
            ),
            content_encoding="br",
        ),
    ],
    "bodies that are wrong": [
        *(raw(path, body) for path in ROUTES for body in BODIES),
        *(get("/status-env", body) for body in WRONG_IDS),
        raw(
            "/register",
            b"\xff",
            Differs(
                "broken text", (400, {"detail": "There was an error parsing the body"}), refused()
            ),
        ),
        *(post("/register", trainer(batch_size=size)) for size in ("x", None, 8.5, "8")),
        *(INFO, BATCH),
        *(
            post("/register-env", environment(**fields))
            for fields in ({"group_size": None}, {"weight": "1"}, {"extra": 1})
        ),
        *(
            post("/register-env", {**environment(), "min_batch_allocation": None}),
            post("/disconnect-env", {"env_id": "0"}),
        ),
        *(data(scores=scores) for scores in ("x", [1, 2, "x", 4], [1, 2, "3", 4])),
        *(data(tokens=[row] * 4) for row in ([1, 2, "x"], [1, 1.5, 2], ["7", 7.0, 7])),
        *(
            post("/scored_data", {**group(), name: {}})
            for name in ("masks", "overrides", "advantages", "distill_token_ids")
        ),
        *(
            data(generation_params=[]),
            data(env_id="0"),
            data(env_id="x"),
            data(env_id=None),
            STATUS,
        ),
        data(Differs("messages", CRASHED, refused("messages")), messages=5),
        *(
            data(messages=messages)
            for messages in (["a"], [[{"role": "user"}]], [[{"content": "a"}]])
        ),
        raw(
            "/scored_data",
            json.dumps(group()).encode(),
            Differs("any content type", refused(), RECEIVED),
            content_type="text/x",
        ),
    ],
    "reset": [
        *begin(),
        *(data(env_id=0), get("/reset_data"), STATUS, get("/wandb_info")),
        get("/info", differs=Differs("half a reset", info(-1, 128), info(-1, -1))),
        get(
            "/latest_example",
            differs=Differs("half a reset", (200, {"example": 7}), (200, {"example": None})),
        ),
        get("/batch", differs=Differs("half a reset", CRASHED, NO_TRAINER)),
        post("/register-env", environment(), Differs("half a reset", registered(0, -1), WAIT)),
        *(
            get("/reset_data"),
            post("/register", trainer()),
            INFO,
            post("/register-env", environment()),
            BATCH,
        ),
        *(
            post("/register-env", environment()),
            post("/scored_data_list", [group(env_id=0)] * 2),
            BATCH,
            STATUS,
        ),
    ],
    "order": [
        *begin(),
        *(data(mark=mark, env_id=0) for mark in (1, 2, 3, 4)),
        *(STATUS, batch("newest first", [3, 4], [1, 2])),
        get("/status", differs=Differs("steps ahead", status(2, 0), status(1, 2))),
        *(batch("newest first", [1, 2], [3, 4]), BATCH, STATUS),
    ],
    "not a number": [
        *begin(),
        data(
            Differs("not a number", RECEIVED, refused("scores")),
            mark=1,
            scores=[0.0, 1.0, float("nan"), 0.0],
        ),
        *(data(mark=2), data(mark=3)),
        get("/batch", differs=Differs("not a number", CRASHED, (200, {"batch": [2, 3]}))),
        *(BATCH, get("/status", differs=Differs("not a number", status(1, 1), status(1, 0)))),
    ],
    "lengths": [
        *begin(),
        data(Differs("lengths", RECEIVED, refused("scores")), scores=[1.0]),
        data(Differs("lengths", RECEIVED, refused("masks")), masks=[[1]]),
        data(Differs("lengths", RECEIVED, refused("tokens")), tokens=[], masks=[], scores=[]),
        data(Differs("lengths", RECEIVED, refused("tokens")), tokens=[[]] * 4, masks=[[]] * 4),
        get("/status", differs=Differs("lengths", status(0, 4), status(0, 0))),
    ],
    "oversize": [
        *begin(),
        data(Differs("oversize", RECEIVED, refused("tokens")), size=16),
        *(data(mark=1), data(mark=2), batch("oversize", None, [1, 2]), data(mark=3), data(mark=4)),
        batch("oversize", None, [3, 4]),
    ],
    "data before the trainer": [
        *(
            data(mark=1),
            data(mark=2),
            get("/status", differs=Differs("early data", status(0, 0), status(0, 2))),
        ),
        *(
            post("/register", trainer()),
            get("/info", differs=Differs("early data", info(-1, -1), info(8, 128))),
        ),
        get("/batch", differs=Differs("early data", NO_TRAINER, (200, {"batch": [1, 2]}))),
        post("/register-env", environment(), Differs("early data", WAIT, registered(1, 100))),
    ],
    "a second trainer": [
        *begin(),
        *(
            post("/scored_data_list", [group(mark=1), group(mark=2)]),
            BATCH,
            post("/register", trainer()),
        ),
        *(batch("dead trainer", None, [1, 2]), STATUS),
        post(
            "/register", trainer(batch_size=4, max_token_len=64, wandb_group="new", starting_step=7)
        ),
        get("/info", differs=Differs("second trainer", info(8, 128), info(4, 64))),
        get("/status", differs=Differs("second trainer", status(1, 0), status(7, 2))),
    ],
    "reserved shares": [
        *begin(environment(), environment(min_batch_allocation=0.5)),
        *(
            post("/scored_data_list", [group(mark=1, env_id=0)] * 4),
            BATCH,
            env_status(1),
            data(mark=2, env_id=1),
        ),
        *(
            batch("newest first", [2, 1], [1, 2]),
            BATCH,
            post("/disconnect-env", {"env_id": 1}),
            BATCH,
        ),
    ],
    "shares above one": [
        *begin(
            environment(),
            environment(min_batch_allocation=0.8),
            environment(min_batch_allocation=0.8),
        ),
        *(
            env_status(0),
            post(
                "/scored_data_list",
                [group(mark=env_id, env_id=env_id) for env_id in (0, 0, 1, 1, 2, 2)],
            ),
        ),
        *(BATCH, BATCH, BATCH),
    ],
    "weight": [
        *begin(environment(), environment(weight=3.0), batch_size=16),
        post(
            "/scored_data_list", [group(mark=env_id, env_id=env_id) for env_id in [0] * 8 + [1] * 8]
        ),
        *(
            env_status(0),
            env_status(1),
            batch("no weight", [1] * 4, [0, 1, 1, 1]),
            batch("no weight", [1] * 4, [0, 1, 1, 1]),
        ),
    ],
    "bound": [  # ours with --max-queue-groups 6
        *begin(),
        *(data(mark=mark, env_id=0) for mark in range(6)),
        data(
            Differs("no bound", RECEIVED, (429, {"detail": "the queue holds 6 groups"})), env_id=0
        ),
    ],
    "crash": [
        *begin(),
        *(post("/scored_data_list", [group(mark=1, env_id=0), group(mark=2, env_id=0)]), RESTART),
        get("/info", differs=Differs("crash", info(-1, -1), info(8, 128))),
        get("/status", differs=Differs("crash", status(0, 0), status(0, 2))),
        get(
            "/status-env",
            {"env_id": 0},
            Differs("crash", CRASHED, (200, {"queue_size": 2, "self_queue_size": 2})),
        ),
        get("/batch", differs=Differs("crash", NO_TRAINER, (200, {"batch": [1, 2]}))),
    ],
}
