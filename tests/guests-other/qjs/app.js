// Handlers in JavaScript, for QuickJS: each shows one feature of the host.
import { abort, log } from "rouse:handler/context@0.1.0";
import { start, complete } from "rouse:handler/steps@0.1.0";

// QuickJS has no TextEncoder: UTF-8 is made through the escapes of URIs.
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

  // The contract for QuickJS lacks `subscribe`: the handler polls for the abort while it computes.
  wait() {
    log("info", "waiting");
    const signal = abort();
    while (signal.reason() === null) {}
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
    return JSON.stringify({ handlers: names.map((name) => ({ name: `qjs.${name}` })) });
  },

  run(job) {
    const name = job.handler.replace("qjs.", "");
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
