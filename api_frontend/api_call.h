/*
 * api_call.h: one call of a client, whatever it came in by: HTTP (http_server.c), the trainer's
 * socket (trainer_port.c), or a test. A handler gets it and ends it exactly once, now or later, by
 * one of api_call_ok, api_call_error, api_call_reply, api_call_stream_end or api_call_discard;
 * after that the call must not be touched.
 */
#ifndef LK_API_FRONTEND_API_CALL_H
#define LK_API_FRONTEND_API_CALL_H

#include "base/buf.h"

#include <jansson.h>

#define API_KEY_MAX 255 /* bytes */

typedef struct api_call api_call_t;
struct api_route;
struct reply_cache_entry;

/* The transport's side. */
typedef struct {
    /* A whole reply, of call->content_type. */
    void (*reply)(api_call_t *call, int http_status, const char *body, size_t len);
    /* NULL where there are no streams. data is false when the client does not read: the handler
     * then gives up with api_call_discard. */
    void (*stream_begin)(api_call_t *call);
    bool (*stream_data)(api_call_t *call, const char *data, size_t len);
    void (*stream_end)(api_call_t *call);
    /* Frees the call, after an end or instead of one; closes what is still open. */
    void (*destroy)(api_call_t *call);
} api_call_ops_t;

struct api_call {
    const api_call_ops_t *ops;
    const struct api_route *route;
    /* what was asked; set by the transport before api_dispatch */
    const char *raw_body; /* JSON text, borrowed until the handler returns; NULL: body is set. A
                             handler has both: `body` is what was read of it */
    size_t raw_len;
    json_t *body;              /* object or NULL; owned */
    json_t *query;             /* object of strings or NULL; owned */
    char key[API_KEY_MAX + 1]; /* bearer token, or admin_key; "" without */
    char idempotency_key[128];
    char request_id[64];      /* X-Request-Id; "" without */
    int64_t rank;             /* X-data-parallel-rank; -1 without */
    uint64_t session;         /* router_session of X-Session-ID; 0 without */
    int64_t unix_time;        /* seconds, at arrival */
    const char *content_type; /* of a whole reply, static; NULL: JSON */
    /* the handler's */
    void *state;
    void (*on_gone)(api_call_t *call); /* the client left; NULL: the call goes on without it */
    /* api.c's */
    bool gone;
    struct reply_cache_entry *cached;
    char arg_param[64];
};

void api_call_reply(api_call_t *call, int http_status, const char *body, size_t len);
/* Takes the object. NULL (out of memory) is a 500. */
void api_call_ok(api_call_t *call, json_t *object);
/* {"error":{"message","type","param","code"}}; param may be NULL. */
void api_call_error(api_call_t *call, int http_status, const char *param, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));
void api_call_stream_begin(api_call_t *call);
bool api_call_stream_data(api_call_t *call, const char *data, size_t len);
void api_call_stream_end(api_call_t *call);
void api_call_discard(api_call_t *call);
/* By the transport: the client is gone. The call may be freed by this. */
void api_call_client_gone(api_call_t *call);

/* The envelope alone, for an error inside a stream. */
void api_error_json(lk_buf_t *out, int http_status, const char *param, const char *message);

/* ---- arguments: the query first, then the body. false: the call was answered with a 400 that
 * names the argument ("query.mode" or "mode"). *out keeps its value when it is absent or null. ----
 */
bool api_arg_bool(api_call_t *call, const char *name, bool *out);
bool api_arg_seconds(api_call_t *call, const char *name, double *out);
/* NULL stays; the text lives as long as the call's arguments. */
bool api_arg_str(api_call_t *call, const char *name, const char **out);
/* index of the text in names (ends with NULL). */
bool api_arg_choice(api_call_t *call, const char *name, const char *const *names, int *out);

#endif
