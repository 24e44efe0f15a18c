/*
 * http_refusal.h: JSON in place of the HTML pages that evhttp writes by itself for what is no HTTP
 * (malformed request line or header, a length it does not believe, too large, an unknown method).
 * evhttp 2.1 has no callback for these, but whatever it writes passes the connection's output.
 */
#ifndef LK_API_FRONTEND_HTTP_REFUSAL_H
#define LK_API_FRONTEND_HTTP_REFUSAL_H

#include <event2/bufferevent.h>
#include <event2/event.h>

/* A bufferevent for evhttp_set_bevcb (ctx is unused) whose output has no HTML page. */
struct bufferevent *http_refusal_bufferevent(struct event_base *base, void *ctx);

#endif
