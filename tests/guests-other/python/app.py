"""Handlers in Python: each shows one feature of the host."""

import json
import sys

from componentize_py_types import Err
from wit_world import exports
from wit_world.imports import context, steps
from wit_world.imports.types import Failure, JobInfo, Level


def log(job: JobInfo, payload: str) -> object:
    context.log(Level.INFO, payload)
    print("printed by Python")
    return {"logged": payload}


def fail(job: JobInfo, payload: str) -> object:
    details = json.dumps({"by": "python"}).encode()
    raise Err(Failure("refused", payload, details, True, None))


def step(job: JobInfo, payload: str) -> object:
    """The first attempt records its number and fails; the next one gets that number back."""
    recorded = steps.start("number")
    if recorded is None:
        steps.complete("number", json.dumps(job.attempt).encode())
        raise Err(Failure("once", "the step is recorded", None, False, 0))
    return {"recorded": json.loads(recorded), "attempt": job.attempt}


def wait(job: JobInfo, payload: str) -> object:
    context.log(Level.INFO, "waiting")
    with context.abort() as abort:
        with abort.subscribe() as aborted:
            aborted.block()
        return {"reason": abort.reason().name}


def crash(job: JobInfo, payload: str) -> object:
    return {"missing": payload["missing"]}


HANDLERS = {"log": log, "fail": fail, "steps": step, "wait": wait, "crash": crash}


class Handlers(exports.Handlers):
    def describe(self) -> str:
        return json.dumps({"handlers": [{"name": f"python.{name}"} for name in HANDLERS]})

    def run(self, job: JobInfo) -> bytes:
        handler = HANDLERS[job.handler.removeprefix("python.")]
        return json.dumps(handler(job, json.loads(job.payload))).encode()
