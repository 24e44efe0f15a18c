/*
 * http_client.h: the client side of the HTTP interface, on libcurl: blocking calls for the status
 * command and tests, and many server-sent-event streams in one thread for the demo and load
 * generators. One thread per object.
 */
#ifndef LK_DEPLOY_CLIENT_HTTP_CLIENT_H
#define LK_DEPLOY_CLIENT_HTTP_CLIENT_H

#include "base/buf.h"

typedef struct {
    int status;    /* HTTP status; 0 when no reply came */
    lk_buf_t body; /* lk_buf_cstr() for text */
} http_reply_t;

void http_reply_fini(http_reply_t *reply);

/* One call. body NULL: no body. key NULL: no Authorization header. LK_OK whenever a reply came,
 * whatever its status; LK_ERR_PEER (refused, closed), LK_ERR_TIMEOUT otherwise. The caller calls
 * http_reply_fini in either case. */
LK_MUST_USE lk_status_t http_call(const char *method, const char *url, const char *body,
                                  const char *key, double timeout_s, http_reply_t *out,
                                  lk_error_t *err);

/* Same, with further headers: "Name: value"..., NULL-terminated; NULL: none. */
LK_MUST_USE lk_status_t http_call_with(const char *method, const char *url, const char *body,
                                       const char *key, const char *const *headers,
                                       double timeout_s, http_reply_t *out, lk_error_t *err);

typedef struct http_streams http_streams_t;
typedef struct http_stream http_stream_t;

typedef struct {
    /* One "data:" line (without the prefix), NUL-terminated. */
    void (*data)(void *ctx, const char *text, size_t len);
    /* The end, once: the HTTP status (0: no reply) and "" or what went wrong. The stream is freed
     * after the call. body: the reply when it was no event stream. */
    void (*end)(void *ctx, int status, const char *error, const char *body);
} http_stream_events_t;

http_streams_t *http_streams_new(void);
void http_streams_destroy(http_streams_t **self_p);
/* POSTs a JSON body. NULL when out of memory. */
http_stream_t *http_streams_post(http_streams_t *self, const char *url, const char *body,
                                 const char *key, const http_stream_events_t *events, void *ctx);
/* Closes the connection; no further callback. */
void http_streams_cancel(http_streams_t *self, http_stream_t *stream);
/* Moves bytes and calls callbacks; waits at most timeout_ms for something to do. Returns the number
 * of open streams. */
size_t http_streams_poll(http_streams_t *self, int timeout_ms);

#endif
