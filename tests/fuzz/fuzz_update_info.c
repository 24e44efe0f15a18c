/* Bodies of the weight calls: byte 0 picks the verb, the rest is the JSON. */
#include "base/check.h"
#include "transfer/backends/backends.h"
#include "transfer/update_session.h"

#include <stdint.h>
#include <string.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static lk_status_t any_tensors(void *ctx, const tensor_desc_t *tensors, size_t n, lk_error_t *err)
{
    for (size_t i = 0; i < n; i++) {
        uint64_t bytes;
        bool fits = tensor_desc_bytes(&tensors[i], &bytes);
        CHECK(fits && tensors[i].name[0] != '\0');
    }
    return LK_OK;
}

static lk_status_t no_tensor(void *ctx, size_t index, const void *bytes, size_t len,
                             lk_error_t *err)
{
    CHECKF(false, "nothing was received");
}

static bool never(void *ctx)
{
    return false;
}

static void nothing(void *ctx)
{
}

static lk_status_t no_commit(void *ctx, lk_error_t *err)
{
    return LK_OK;
}

static digest_t no_digest(void *ctx)
{
    return (digest_t){{0}};
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const weight_sink_ops_t ops = {.check = any_tensors,
                                          .plan = any_tensors,
                                          .tensor = no_tensor,
                                          .complete = never,
                                          .begin = nothing,
                                          .commit = no_commit,
                                          .digest = no_digest};
    if (size == 0) {
        return 0;
    }
    update_verb_t verb = (update_verb_t)(UPDATE_VERB_INIT + data[0] % 6);
    wte_context_t ctx = {.dp_rank = data[0] / 6 % 2,
                         .dp_size = 2,
                         .ranks_per_replica = 1,
                         .env = lk_env_real(),
                         .no_progress_ns = 1};
    weight_sink_t sink = {&ops, NULL};
    update_session_t *session = update_session_new(&wte_tcp, &ctx, &sink);
    CHECK(session != NULL);
    /* the exact size, so that a sanitizer sees a read past the end */
    char *text = malloc(size);
    CHECK(text != NULL);
    memcpy(text, data + 1, size - 1);
    lk_error_t err = LK_ERROR_INIT;
    lk_status_t st = update_session_check(session, verb, text, size - 1, &err);
    CHECK(st <= 0 && (st == LK_OK) == (err.text[0] == '\0'));
    if (verb != UPDATE_VERB_INIT) { /* which would connect to wherever it says */
        st = update_session_post(session, verb, text, size - 1, &err);
        CHECK(st == LK_OK || st == LK_ERR_STATE || st == LK_ERR_INVALID || st == LK_ERR_TOO_LARGE);
        st = update_session_outcome(session, verb, st == LK_OK, &err);
        CHECK(st == LK_OK);
    }
    CHECK(update_session_state(session) == UPDATE_STATE_UNCONFIGURED);
    update_session_destroy(&session);
    free(text);
    return 0;
}
