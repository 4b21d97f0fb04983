// Handlers in JavaScript, for QuickJS: each shows one thing that the host offers.
import { abort, log } from "rouse:handler/context@0.1.0";
import { start, complete } from "rouse:handler/steps@0.1.0";

// QuickJS has no TextEncoder: UTF-8 by way of the escapes of addresses.
const encode = (value) =>
  Uint8Array.from(unescape(encodeURIComponent(JSON.stringify(value))), (c) => c.charCodeAt(0));
const decode = (bytes) =>
  JSON.parse(decodeURIComponent(escape(Array.from(bytes, (b) => String.fromCharCode(b)).join(""))));

const HANDLERS = {
  log(job, payload) {
    log("info", payload);
    return { logged: payload };
  },

  fail(job, payload) {
    throw { kind: "refused", message: payload, details: encode({ by: "qjs" }), permanent: true };
  },

  // The first attempt records its number and fails; the next one gets that number back.
  steps(job) {
    const recorded = start("number");
    if (recorded === null) {
      complete("number", encode(job.attempt));
      throw { kind: "once", message: "the step is recorded", permanent: false, retryAfterMs: 0n };
    }
    return { recorded: decode(recorded), attempt: job.attempt };
  },

  // Its contract lacks `subscribe`: it looks whether it has to stop while it computes.
  wait() {
    log("info", "waiting");
    const signal = abort();
    while (signal.reason() === null) {}
    return { told: signal.reason() };
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
    return JSON.stringify({ handlers: names.map((name) => ({ name: `qjs.${name}` })) });
  },

  run(job) {
    const name = job.handler.replace("qjs.", "");
    try {
      return encode(HANDLERS[name](job, decode(job.payload)));
    } catch (error) {
      // What is thrown becomes the failure, where it has its fields; anything else is a trap.
      if (!(error instanceof Error)) throw error;
      const details = encode({ stack: error.stack });
      throw { kind: error.name, message: error.message, details, permanent: false };
    }
  },
};
