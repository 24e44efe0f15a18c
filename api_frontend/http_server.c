#include "api_frontend/http_server.h"
#include "api_frontend/http_refusal.h"
#include "api_frontend/router.h"
#include "base/check.h"
#include "base/env.h"
#include "base/log.h"

#include <event2/buffer.h>
#include <event2/bufferevent.h>
#include <event2/http.h>
#include <event2/keyvalq_struct.h>
#include <event2/listener.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/queue.h>
#include <sys/socket.h>
#include <time.h>

#define BACKLOG         4096
#define NO_TIMEOUT      (7 * 24 * 3600) /* of a call that is worked on: it has its own deadlines */
#define ACCEPT_SAY_NS   (10 * LK_SECOND_NS)
#define ACCEPT_PAUSE_MS 100          /* after an accept that failed, at most */
#define MAX_AHEAD       (256u << 10) /* bytes read ahead of the call that is worked on */

struct http_server {
    struct event_base *base;
    struct evhttp *http;
    struct evhttp_bound_socket *socket;
    struct event *accept_again;
    api_t *api;
    http_limits_t limits;
    void (*after_event)(void *ctx);
    void *ctx;
    uint16_t port;
    size_t n_open;
    bool destroying;
};

typedef struct {
    api_call_t base;
    http_server_t *server;
    struct evhttp_request *req; /* NULL: the client is gone, or everything was said */
    bool streaming;
} http_call_t;

static struct evhttp_connection *connection(const http_call_t *hc)
{
    return hc->req != NULL ? evhttp_request_get_connection(hc->req) : NULL;
}

static const char *header(const struct evhttp_request *req, const char *name)
{
    return evhttp_find_header(evhttp_request_get_input_headers((struct evhttp_request *)req), name);
}

static void add_header(struct evhttp_request *req, const char *name, const char *value)
{
    evhttp_add_header(evhttp_request_get_output_headers(req), name, value);
}

/* ---- replies ---- */

/* The call is answered: the connection goes back to waiting for requests. */
static void release(http_call_t *hc)
{
    struct evhttp_connection *conn = connection(hc);
    if (conn != NULL) {
        evhttp_connection_set_closecb(conn, NULL, NULL);
        bufferevent_setwatermark(evhttp_connection_get_bufferevent(conn), EV_READ, 0, 0);
        evhttp_connection_set_timeout(conn, (int)hc->server->limits.idle_s);
    }
}

static void on_complete(struct evhttp_request *req, void *ctx)
{
    http_server_t *self = ctx;
    if (self->n_open > 0) {
        self->n_open--;
    }
}

static void send_body(struct evhttp_request *req, int status, const char *type, const char *body,
                      size_t len)
{
    char length[32];
    snprintf(length, sizeof length, "%zu", len);
    add_header(req, "Content-Type", type != NULL ? type : "application/json");
    add_header(req, "Content-Length", length);
    struct evbuffer *buf = evbuffer_new();
    CHECKF(buf != NULL && evbuffer_add(buf, body, len) == 0, "out of memory");
    evhttp_send_reply(req, status, NULL, buf);
    evbuffer_free(buf);
}

static void reply(api_call_t *call, int http_status, const char *body, size_t len)
{
    http_call_t *hc = (http_call_t *)call;
    if (hc->req == NULL) {
        return;
    }
    release(hc);
    if (http_status == 401) {
        add_header(hc->req, "WWW-Authenticate", "Bearer");
    }
    if (call->request_id[0] != '\0') {
        add_header(hc->req, "X-Request-Id", call->request_id);
    }
    struct evhttp_request *req = hc->req;
    hc->req = NULL;
    send_body(req, http_status, call->content_type, body, len);
}

static void stream_begin(api_call_t *call)
{
    http_call_t *hc = (http_call_t *)call;
    hc->streaming = true;
    add_header(hc->req, "Content-Type", "text/event-stream; charset=utf-8");
    add_header(hc->req, "Cache-Control", "no-cache");
    evhttp_send_reply_start(hc->req, 200, "OK");
}

static bool stream_data(api_call_t *call, const char *data, size_t len)
{
    http_call_t *hc = (http_call_t *)call;
    struct evhttp_connection *conn = connection(hc);
    if (conn == NULL) {
        return false;
    }
    struct evbuffer *out = bufferevent_get_output(evhttp_connection_get_bufferevent(conn));
    if (evbuffer_get_length(out) + len > hc->server->limits.max_unsent) {
        return false;
    }
    struct evbuffer *buf = evbuffer_new();
    if (buf == NULL || evbuffer_add(buf, data, len) != 0) {
        if (buf != NULL) {
            evbuffer_free(buf);
        }
        return false;
    }
    evhttp_send_reply_chunk(hc->req, buf);
    evbuffer_free(buf);
    return true;
}

static void stream_end(api_call_t *call)
{
    http_call_t *hc = (http_call_t *)call;
    release(hc);
    struct evhttp_request *req = hc->req;
    hc->req = NULL;
    evhttp_send_reply_end(req);
}

static void destroy(api_call_t *call)
{
    http_call_t *hc = (http_call_t *)call;
    struct evhttp_connection *conn = connection(hc);
    if (conn != NULL) { /* discarded: there is nothing sensible to say on this connection */
        evhttp_connection_set_closecb(conn, NULL, NULL);
        on_complete(hc->req, hc->server);
        evhttp_request_set_on_complete_cb(hc->req, NULL, NULL);
        evhttp_connection_free(conn);
    }
    free(hc);
}

static const api_call_ops_t call_ops = {reply, stream_begin, stream_data, stream_end, destroy};

/* evhttp is about to free the connection. A request that it has taken off is ours to free. */
static void on_close(struct evhttp_connection *conn, void *ctx)
{
    http_call_t *hc = ctx;
    http_server_t *self = hc->server;
    struct evhttp_request *req = hc->req;
    hc->req = NULL;
    on_complete(req, self);
    evhttp_request_set_on_complete_cb(req, NULL, NULL);
    if (evhttp_request_get_connection(req) == NULL) {
        evhttp_request_free(req);
    }
    api_call_client_gone(&hc->base);
    if (self->after_event != NULL && !self->destroying) {
        self->after_event(self->ctx);
    }
}

/* ---- requests ---- */

static const char *method_name(struct evhttp_request *req)
{
    switch (evhttp_request_get_command(req)) {
    case EVHTTP_REQ_GET:
        return "GET";
    case EVHTTP_REQ_POST:
        return "POST";
    case EVHTTP_REQ_HEAD:
        return "HEAD";
    case EVHTTP_REQ_PUT:
        return "PUT";
    case EVHTTP_REQ_DELETE:
        return "DELETE";
    case EVHTTP_REQ_OPTIONS:
        return "OPTIONS";
    case EVHTTP_REQ_PATCH:
        return "PATCH";
    default:
        return "?";
    }
}

static void refuse(struct evhttp_request *req, int status, const char *param, const char *message)
{
    lk_buf_t out;
    lk_buf_init(&out, 0);
    if (evhttp_request_get_command(req) != EVHTTP_REQ_HEAD) {
        api_error_json(&out, status, param, message);
    }
    send_body(req, status, NULL, lk_buf_cstr(&out), out.len);
    lk_buf_fini(&out);
}

static bool refuse_header(struct evhttp_request *req, const char *name, const char *message)
{
    add_header(req, "Connection", "close"); /* where the request ends is anybody's guess */
    refuse(req, 400, name, message);
    return false;
}

/* What evhttp lets pass and other parsers read differently, which is how requests get smuggled: it
 * takes the first of two Content-Lengths, reads "+5" as 5, and a blank before the colon as a part
 * of the name, and (before Debian's deb12u1) both ways to say a length at once. False: answered. */
static bool headers_ok(struct evhttp_request *req)
{
    unsigned n = 0;
    bool chunked = false;
    const struct evkeyval *h;
    TAILQ_FOREACH(h, evhttp_request_get_input_headers(req), next)
    {
        chunked |= strcasecmp(h->key, "Transfer-Encoding") == 0;
        char name[64];
        snprintf(name, sizeof name, "%.*s", (int)strcspn(h->key, " \t"), h->key);
        if (h->key[strcspn(h->key, " \t")] != '\0') {
            return refuse_header(req, name, "there is a blank in a header's name");
        }
        if (strcasecmp(h->key, "Content-Length") == 0) {
            if (h->value[0] == '\0' || h->value[strspn(h->value, "0123456789")] != '\0') {
                return refuse_header(req, "Content-Length", "Content-Length must be a number");
            }
            n++;
        }
    }
    if (n > 0 && chunked) {
        return refuse_header(req, "Content-Length",
                             "Content-Length and Transfer-Encoding exclude each other");
    }
    return n <= 1 || refuse_header(req, "Content-Length", "Content-Length is there more than once");
}

/* A copy of a header into a field of the call; false (answered) when it is too long or has bytes
 * outside printable ASCII. */
static bool copy_header(struct evhttp_request *req, const char *name, char *out, size_t room)
{
    const char *value = header(req, name);
    size_t n = value != NULL ? strlen(value) : 0;
    bool ok = n < room;
    for (size_t i = 0; i < n && ok; i++) {
        ok = value[i] > ' ' && value[i] < 127 && value[i] != '"' && value[i] != '\\';
    }
    if (!ok) {
        char message[128];
        snprintf(message, sizeof message, "%s must have at most %zu printable ASCII characters",
                 name, room - 1);
        refuse(req, 400, name, message);
        return false;
    }
    memcpy(out, value != NULL ? value : "", n + 1);
    return true;
}

static bool read_rank(struct evhttp_request *req, int64_t *out)
{
    char text[16], *tail = text;
    if (!copy_header(req, "X-data-parallel-rank", text, sizeof text)) {
        return false;
    }
    if (text[0] != '\0') {
        long rank = strtol(text, &tail, 10);
        if (*tail != '\0' || text[0] < '0' || text[0] > '9' || rank > INT32_MAX) {
            refuse(req, 400, "X-data-parallel-rank", "X-data-parallel-rank must be a rank number");
            return false;
        }
        *out = rank;
    }
    return true;
}

static bool read_query(struct evhttp_request *req, json_t **out)
{
    const char *text = evhttp_uri_get_query(evhttp_request_get_evhttp_uri(req));
    if (text == NULL || text[0] == '\0') {
        return true;
    }
    struct evkeyvalq pairs;
    if (evhttp_parse_query_str(text, &pairs) != 0) {
        refuse(req, 400, "query", "the query is not made of name=value pairs");
        return false;
    }
    json_t *query = json_object();
    bool ok = true;
    const struct evkeyval *pair;
    TAILQ_FOREACH(pair, &pairs, next)
    {
        /* NULL when it is not UTF-8 */
        ok = ok && json_object_set_new(query, pair->key, json_string(pair->value)) == 0;
    }
    evhttp_clear_headers(&pairs);
    if (!ok) {
        json_decref(query);
        refuse(req, 400, "query", "the query is not UTF-8");
        return false;
    }
    *out = query;
    return true;
}

static void read_key(struct evhttp_request *req, api_call_t *call)
{
    const char *value = header(req, "Authorization");
    if (value != NULL && strncasecmp(value, "Bearer ", 7) == 0) {
        value += 7 + strspn(value + 7, " ");
        if (strlen(value) < sizeof call->key) {
            snprintf(call->key, sizeof call->key, "%s", value);
        }
    }
}

static const api_route_t *find_route(struct evhttp_request *req)
{
    const char *path = evhttp_uri_get_path(evhttp_request_get_evhttp_uri(req));
    bool method_ok;
    char allow[32] = "";
    const api_route_t *route =
        api_find_route(method_name(req), path != NULL ? path : "", &method_ok, allow);
    if (route == NULL) {
        char message[256];
        snprintf(message, sizeof message, "there is no such path: %.200s",
                 path != NULL ? path : "");
        refuse(req, 404, "path", message);
    } else if (!method_ok) {
        char message[64];
        snprintf(message, sizeof message, "this path takes %s only", allow);
        add_header(req, "Allow", allow);
        refuse(req, 405, "method", message);
        route = NULL;
    }
    return route;
}

/* While a call is worked on: no timeout, a bound on what is read ahead, and reading goes on so that
 * a close is noticed at once. evhttp expects no input now, so its read callback rests; it comes
 * back with the reply. */
static void watch_client(http_call_t *hc)
{
    struct evhttp_connection *conn = connection(hc);
    struct bufferevent *bev = evhttp_connection_get_bufferevent(conn);
    evhttp_connection_set_timeout(conn, NO_TIMEOUT);
    evhttp_connection_set_closecb(conn, on_close, hc);
    bufferevent_data_cb on_write;
    bufferevent_event_cb on_event;
    void *ctx;
    bufferevent_getcb(bev, NULL, &on_write, &on_event, &ctx);
    bufferevent_setcb(bev, NULL, on_write, on_event, ctx);
    bufferevent_setwatermark(bev, EV_READ, 0, MAX_AHEAD);
    bufferevent_enable(bev, EV_READ);
}

static void on_request(struct evhttp_request *req, void *ctx)
{
    http_server_t *self = ctx;
    const api_route_t *route = headers_ok(req) ? find_route(req) : NULL;
    if (route == NULL) {
        return;
    }
    http_call_t *hc = calloc(1, sizeof *hc);
    if (hc == NULL) {
        refuse(req, 503, NULL, "out of memory");
        return;
    }
    api_call_t *call = &hc->base;
    *call = (api_call_t){
        .ops = &call_ops, .route = route, .rank = -1, .unix_time = (int64_t)time(NULL)};
    hc->server = self;
    if (!copy_header(req, "Idempotency-Key", call->idempotency_key, sizeof call->idempotency_key) ||
        !copy_header(req, "X-Request-Id", call->request_id, sizeof call->request_id) ||
        !read_rank(req, &call->rank) || !read_query(req, &call->query)) {
        json_decref(call->query);
        free(hc);
        return;
    }
    read_key(req, call);
    const char *session = header(req, "X-Session-ID");
    if (session != NULL && session[0] != '\0') {
        call->session = router_session(session, strlen(session));
    }
    hc->req = req;
    watch_client(hc);
    evhttp_request_set_on_complete_cb(req, on_complete, self);
    self->n_open++;
    struct evbuffer *body = evhttp_request_get_input_buffer(req);
    call->raw_len = evbuffer_get_length(body);
    call->raw_body = call->raw_len > 0 ? (const char *)evbuffer_pullup(body, -1) : "";
    CHECKF(call->raw_body != NULL, "out of memory");
    api_dispatch(self->api, call);
    if (self->after_event != NULL) {
        self->after_event(self->ctx);
    }
}

/* ---- listening ---- */

/* No descriptors or memory left. libevent would try again at once, and log it, for as long as that
 * lasts. (ctx is evhttp's: the listener alone says whose it is, so the server's timer enables it.)
 */
static void on_accept_error(struct evconnlistener *listener, void *ctx)
{
    static uint64_t said_ns; /* of the process: one line in ACCEPT_SAY_NS is enough for all */
    int error = errno;
    uint64_t now = lk_env_now_ns(lk_env_real());
    if (said_ns == 0 || now - said_ns >= ACCEPT_SAY_NS) {
        LK_WARN("new connections wait: %s", strerror(error));
        said_ns = now;
    }
    evconnlistener_disable(listener);
}

static void on_accept_again(evutil_socket_t fd, short what, void *ctx)
{
    http_server_t *self = ctx;
    evconnlistener_enable(evhttp_bound_socket_get_listener(self->socket));
}

static lk_status_t listen_on(http_server_t *self, const char *host, uint16_t port, lk_error_t *err)
{
    self->socket = evhttp_bind_socket_with_handle(self->http, host, port);
    if (self->socket == NULL) {
        return lk_error_set(err, LK_ERR_IO, "can not listen on %s port %u: %s", host, port,
                            strerror(errno));
    }
    struct timeval period = {0, ACCEPT_PAUSE_MS * 1000};
    self->accept_again = event_new(self->base, -1, EV_PERSIST, on_accept_again, self);
    if (self->accept_again == NULL || event_add(self->accept_again, &period) != 0) {
        return lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory");
    }
    evconnlistener_set_error_cb(evhttp_bound_socket_get_listener(self->socket), on_accept_error);
    int fd = evhttp_bound_socket_get_fd(self->socket), on = 1;
    /* Linux hands it to accepted sockets; without it every stream starts 40 ms late. */
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    if (listen(fd, BACKLOG) != 0) {
        return lk_error_set(err, LK_ERR_IO, "listen: %s", strerror(errno));
    }
    struct sockaddr_storage address = {0};
    socklen_t len = sizeof address;
    if (getsockname(fd, (struct sockaddr *)&address, &len) != 0) {
        return lk_error_set(err, LK_ERR_IO, "getsockname: %s", strerror(errno));
    }
    self->port = ntohs(address.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)&address)->sin6_port
                                                     : ((struct sockaddr_in *)&address)->sin_port);
    return LK_OK;
}

lk_status_t http_server_new(struct event_base *base, api_t *api, const char *host, uint16_t port,
                            const http_limits_t *limits, void (*after_event)(void *ctx), void *ctx,
                            http_server_t **out, lk_error_t *err)
{
    http_server_t *self = calloc(1, sizeof *self);
    if (self == NULL) {
        return lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory");
    }
    *self = (http_server_t){.base = base,
                            .api = api,
                            .limits = *limits,
                            .after_event = after_event,
                            .ctx = ctx,
                            .http = evhttp_new(base)};
    if (self->http == NULL) {
        free(self);
        return lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory");
    }
    evhttp_set_max_headers_size(self->http, (ev_ssize_t)limits->max_headers);
    evhttp_set_max_body_size(self->http, (ev_ssize_t)limits->max_body);
    evhttp_set_timeout(self->http, (int)limits->idle_s);
    evhttp_set_allowed_methods(self->http, EVHTTP_REQ_GET | EVHTTP_REQ_POST | EVHTTP_REQ_HEAD |
                                               EVHTTP_REQ_PUT | EVHTTP_REQ_DELETE |
                                               EVHTTP_REQ_OPTIONS | EVHTTP_REQ_PATCH);
    evhttp_set_bevcb(self->http, http_refusal_bufferevent, NULL);
    evhttp_set_gencb(self->http, on_request, self);
    lk_status_t status = listen_on(self, host, port, err);
    if (status != LK_OK) {
        http_server_destroy(&self);
        return status;
    }
    *out = self;
    return LK_OK;
}

void http_server_destroy(http_server_t **self_p)
{
    if (self_p != NULL && *self_p != NULL) {
        (*self_p)->destroying = true;
        http_server_stop_accepting(*self_p);
        evhttp_free((*self_p)->http);
        free(*self_p);
        *self_p = NULL;
    }
}

uint16_t http_server_port(const http_server_t *self)
{
    return self->port;
}

void http_server_stop_accepting(http_server_t *self)
{
    if (self->accept_again != NULL) {
        event_free(self->accept_again);
        self->accept_again = NULL;
    }
    if (self->socket != NULL) {
        evhttp_del_accept_socket(self->http, self->socket);
        self->socket = NULL;
    }
}

size_t http_server_num_open(const http_server_t *self)
{
    return self->n_open;
}
