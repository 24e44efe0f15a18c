/*
 * http_server.h: the API over HTTP/1.1, on libevent's evhttp, in the caller's event loop. Limits on
 * everything a client sends; a client that goes away or does not read its stream ends its call.
 */
#ifndef LK_API_FRONTEND_HTTP_SERVER_H
#define LK_API_FRONTEND_HTTP_SERVER_H

#include "api_frontend/api.h"

#include <event2/event.h>

typedef struct http_server http_server_t;

typedef struct {
    size_t max_headers; /* bytes; more is a 400 */
    size_t max_body;    /* bytes of any body; more is a 413. Routes have limits of their own */
    size_t max_unsent;  /* bytes a stream may be behind; then it is cut */
    unsigned idle_s;    /* a connection without a whole request is closed after */
} http_limits_t;

#define HTTP_LIMITS_DEFAULT                                                                        \
    ((http_limits_t){                                                                              \
        .max_headers = 64u << 10, .max_body = 64u << 20, .max_unsent = 4u << 20, .idle_s = 75})

/* Binds and listens; port 0 picks one. after_event (may be NULL) is called with ctx after each
 * request that came in and each client that left: messages may be waiting to be sent. */
LK_MUST_USE lk_status_t http_server_new(struct event_base *base, api_t *api, const char *host,
                                        uint16_t port, const http_limits_t *limits,
                                        void (*after_event)(void *ctx), void *ctx,
                                        http_server_t **out, lk_error_t *err);
/* Closes every connection; calls that are still open lose their client. */
void http_server_destroy(http_server_t **self_p);
uint16_t http_server_port(const http_server_t *self);
/* No new connections. */
void http_server_stop_accepting(http_server_t *self);
/* Requests whose last byte was not written yet. */
size_t http_server_num_open(const http_server_t *self);

#endif
