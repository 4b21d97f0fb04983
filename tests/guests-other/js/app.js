// Handlers in JavaScript: each shows one feature of the host.
import { abort, log } from "rouse:handler/context@0.1.0";
import { start, complete } from "rouse:handler/steps@0.1.0";

const encode = (value) => new TextEncoder().encode(JSON.stringify(value));
const decode = (bytes) => JSON.parse(new TextDecoder().decode(bytes));

const HANDLERS = {
  log(job, payload) {
    log("info", payload);
    console.log("printed by JavaScript");
    return { logged: payload };
  },

  fail(job, payload) {
    throw { kind: "refused", message: payload, details: encode({ by: "js" }), permanent: true };
  },

  // The first attempt records its number and fails; the next one gets that number back.
  steps(job) {
    const recorded = start("number");
    if (recorded === undefined) {
      complete("number", encode(job.attempt));
      throw { kind: "once", message: "the step is recorded", permanent: false, retryAfterMs: 0n };
    }
    return { recorded: decode(recorded), attempt: job.attempt };
  },

  wait() {
    log("info", "waiting");
    const signal = abort();
    signal.subscribe().block();
    return { reason: signal.reason() };
  },

  bug(job, payload) {
    return payload.missing.field;
  },

  crash(job, payload) {
    throw payload;
  },
};

export const handlers = {
  describe() {
    const names = Object.keys(HANDLERS);
    return JSON.stringify({ handlers: names.map((name) => ({ name: `js.${name}` })) });
  },

  run(job) {
    const name = job.handler.replace("js.", "");
    try {
      return encode(HANDLERS[name](job, decode(job.payload)));
    } catch (error) {
      // A thrown value becomes the failure if it has its fields; anything else is a trap.
      if (!(error instanceof Error)) throw error;
      const details = encode({ stack: error.stack });
      throw { kind: error.name, message: error.message, details, permanent: false };
    }
  },
};
