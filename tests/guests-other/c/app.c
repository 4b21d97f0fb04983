// Handlers in C: each shows one feature of the host. Payloads are JSON strings without escapes.

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "module.h"

typedef exports_rouse_handler_handlers_job_info_t job_t;
typedef exports_rouse_handler_handlers_failure_t failure_t;
typedef bool handler_t(const job_t *job, module_list_u8_t *result, failure_t *failure);

// Returned memory belongs to the bindings, which free it: return only copies.
static module_list_u8_t bytes(const char *text) {
    module_string_t copy;
    module_string_dup(&copy, text);
    return (module_list_u8_t){copy.ptr, copy.len};
}

static bool failed(failure_t *failure, const char *kind, const char *message, bool permanent) {
    memset(failure, 0, sizeof *failure);
    module_string_dup(&failure->kind, kind);
    module_string_dup(&failure->message, message);
    failure->permanent = permanent;
    return false;
}

// The payload, without its quotes.
static const char *text(const job_t *job) {
    size_t quotes = 2, length = job->payload.len > quotes ? job->payload.len - quotes : 0;
    char *copy = calloc(length + 1, 1);
    return memcpy(copy, job->payload.ptr + 1, length);
}

static bool run_log(const job_t *job, module_list_u8_t *result, failure_t *failure) {
    module_string_t line;
    module_string_set(&line, text(job));
    rouse_handler_context_log(ROUSE_HANDLER_TYPES_LEVEL_INFO, &line);
    puts("printed by C");
    fflush(stdout);
    char json[256];
    snprintf(json, sizeof json, "{\"logged\":\"%s\"}", text(job));
    *result = bytes(json);
    return true;
}

static bool run_fail(const job_t *job, module_list_u8_t *result, failure_t *failure) {
    failed(failure, "refused", text(job), true);
    failure->details = (module_option_list_u8_t){true, bytes("{\"by\":\"c\"}")};
    return false;
}

// The first attempt records its number and fails; the next one gets that number back.
static bool run_steps(const job_t *job, module_list_u8_t *result, failure_t *failure) {
    module_string_t name;
    module_string_set(&name, "number");
    module_option_list_u8_t recorded;
    rouse_handler_steps_step_error_t error;
    char json[64];
    if (!rouse_handler_steps_start(&name, &recorded, &error))
        return failed(failure, "step", "the step cannot be started", false);
    if (recorded.is_some) {
        snprintf(json, sizeof json, "{\"recorded\":%.*s,\"attempt\":%u}", (int)recorded.val.len, recorded.val.ptr,
                 (unsigned)job->attempt);
        *result = bytes(json);
        return true;
    }
    snprintf(json, sizeof json, "%u", (unsigned)job->attempt);
    module_list_u8_t output = bytes(json);
    if (!rouse_handler_steps_complete(&name, &output, &error))
        return failed(failure, "step", "the step cannot be recorded", false);
    failed(failure, "once", "the step is recorded", false);
    failure->retry_after_ms = (module_option_u64_t){true, 0};
    return false;
}

static bool run_wait(const job_t *job, module_list_u8_t *result, failure_t *failure) {
    module_string_t waiting;
    module_string_set(&waiting, "waiting");
    rouse_handler_context_log(ROUSE_HANDLER_TYPES_LEVEL_INFO, &waiting);
    rouse_handler_context_own_abort_signal_t signal = rouse_handler_context_abort();
    rouse_handler_context_borrow_abort_signal_t it = rouse_handler_context_borrow_abort_signal(signal);
    wasi_io_poll_own_pollable_t pollable = rouse_handler_context_method_abort_signal_subscribe(it);
    wasi_io_poll_method_pollable_block(wasi_io_poll_borrow_pollable(pollable));
    wasi_io_poll_pollable_drop_own(pollable);
    rouse_handler_context_abort_signal_drop_own(signal);
    *result = bytes("null");
    return true;
}

static bool run_crash(const job_t *job, module_list_u8_t *result, failure_t *failure) {
    fprintf(stderr, "C gives up: %s\n", text(job));
    abort();
}

static const struct {
    const char *name;
    handler_t *run;
} HANDLERS[] = {
    {"c.log", run_log}, {"c.fail", run_fail}, {"c.steps", run_steps}, {"c.wait", run_wait}, {"c.crash", run_crash},
};

enum { HANDLER_COUNT = sizeof HANDLERS / sizeof *HANDLERS };

void exports_rouse_handler_handlers_describe(module_string_t *manifest) {
    char json[512] = "{\"handlers\":[";
    for (int i = 0; i < HANDLER_COUNT; i++) {
        size_t at = strlen(json);
        snprintf(json + at, sizeof json - at, "%s{\"name\":\"%s\"}", i ? "," : "", HANDLERS[i].name);
    }
    module_string_dup(manifest, strcat(json, "]}"));
}

bool exports_rouse_handler_handlers_run(job_t *job, module_list_u8_t *result, failure_t *failure) {
    for (int i = 0; i < HANDLER_COUNT; i++)
        if (strlen(HANDLERS[i].name) == job->handler.len && !memcmp(HANDLERS[i].name, job->handler.ptr, job->handler.len))
            return HANDLERS[i].run(job, result, failure);
    return failed(failure, "unknown_handler", "this module has no such handler", true);
}
