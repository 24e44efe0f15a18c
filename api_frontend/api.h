/*
 * api.h: the calls a client can make, over any transport: finds the route, checks the key, parses
 * the body, honours idempotency keys, runs the handler. Keeps no pause and no weight state.
 */
#ifndef LK_API_FRONTEND_API_H
#define LK_API_FRONTEND_API_H

#include "api_frontend/api_call.h"
#include "api_frontend/completion_params.h"
#include "api_frontend/engine_client.h"
#include "api_frontend/metrics.h"
#include "api_frontend/reply_cache.h"
#include "base/config.h"

typedef struct api api_t;
struct completion;

typedef enum { API_KEY_NONE, API_KEY_API, API_KEY_ADMIN } api_key_kind_t;
typedef enum { API_BODY_NONE, API_BODY_OPTIONAL, API_BODY_REQUIRED } api_body_kind_t;

typedef struct api_route {
    const char *method, *path, *call;
    void (*handler)(api_t *api, api_call_t *call);
    api_key_kind_t key;
    api_body_kind_t body;
    size_t body_limit;
} api_route_t;

#define API_PING_NS         (15 * LK_SECOND_NS) /* silence on a stream before a ": ping" */
#define API_MAX_JSON_MEMORY (256u << 20)        /* bytes of a parsed body */
#define API_CACHE_ENTRIES   1024
#define API_LONG_WORK_BYTES (256u << 10) /* less than that takes no time worth mentioning */
#define API_LONG_WORK_MS    60000u
#define API_MAX_LOGPROBS    (128u << 20) /* held for all replies; no new ones are taken in beyond */

struct api {
    const lk_config_t *config;
    const lk_env_t *env;
    engine_client_t *client;
    const tokenizer_t *tokenizer; /* NULL: ids only */
    char model[256];
    char trainer_address[256];
    bool draining; /* no new completions */
    /* (optional) What begins (or is over) may hold the loop for seconds. */
    void (*on_long_work)(void *ctx, bool begins);
    void *on_long_work_ctx;
    reply_cache_t *cache;
    /* the last large body of a call to the ranks, and what was read of it: trainers send the same
     * handles again and again */
    lk_buf_t known_text;
    json_t *known_body;
    struct completion *completions; /* live ones */
    size_t n_completions;
    size_t held_logprobs; /* of their replies, at 8 bytes; or what is reserved for them */
    metrics_t metrics;
};

/* All are borrowed and outlive it. */
LK_MUST_USE lk_status_t api_init(api_t *self, const lk_config_t *config, const lk_env_t *env,
                                 engine_client_t *client, const tokenizer_t *tokenizer,
                                 lk_error_t *err);
/* Discards live completions. */
void api_fini(api_t *self);
/* Around what may take long on the loop, if `bytes` of it are in hand: large bodies and replies. */
void api_long_work(api_t *self, size_t bytes, bool begins);
/* Pings silent streams; at least once a second. */
void api_tick(api_t *self);

/* The route of a path, or NULL; *method_ok says whether the method is one of its own, *allow (may
 * be NULL) lists them for an Allow header. */
const api_route_t *api_find_route(const char *method, const char *path, bool *method_ok,
                                  char allow[32]);
/* By its name on the trainer's socket, or NULL. */
const api_route_t *api_find_call(const char *name);
/* call->route is set. Ends the call, now or later. */
void api_dispatch(api_t *self, api_call_t *call);

/* Ends completions as /abort_requests does; ids NULL: all. Returns the number of choices. */
size_t api_abort_completions(api_t *self, const json_t *ids);

void api_limits(const api_t *self, completion_limits_t *out);
/* Answers with the status' HTTP code. */
void api_call_fail(api_call_t *call, lk_status_t status, const char *param, const char *text);

#define ROUTE(method, path, call, handler, key, body, limit)                                       \
    void api_handle_##handler(api_t *api, api_call_t *call_);
#include "api_frontend/routes.def"
#undef ROUTE

#endif
