#include "api_frontend/http_refusal.h"
#include "api_frontend/api_call.h"
#include "base/check.h"

#include <event2/buffer.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A page of evhttp is far smaller; a reply with so much in front of it is none of its pages. */
#define MAX_PAGE 4096

typedef struct {
    int from, to; /* HTTP status of the page, and of the JSON */
    const char *phrase, *param, *message;
} refusal_t;

static const refusal_t refusals[] = {
    {413, 413, "Content Too Large", "body",
     "the body is larger than this server takes, or has a malformed chunk size"},
    {417, 417, "Expectation Failed", "Expect", "Expect must be 100-continue"},
    {501, 405, "Method Not Allowed", "method", "there is no such HTTP method"},
};
static const refusal_t malformed = {
    400, 400, "Bad Request", "request",
    "this is no HTTP/1.1 request: the request line, a header, Content-Length or Transfer-Encoding "
    "is malformed, or the headers are too large"};

static bool ends_like_page(struct evbuffer *out, size_t len)
{
    static const char tail[] = "</html>\n";
    char end[sizeof tail - 1];
    struct evbuffer_ptr at;
    return len >= sizeof end &&
           evbuffer_ptr_set(out, &at, len - sizeof end, EVBUFFER_PTR_SET) == 0 &&
           evbuffer_copyout_from(out, &at, end, sizeof end) == (ev_ssize_t)sizeof end &&
           strncasecmp(end, tail, sizeof end) == 0;
}

/* Where the last reply in text starts, and its status. */
static const char *find_page(const char *text, int *status)
{
    const char *found = NULL;
    for (const char *p = text; (p = strstr(p, "HTTP/1.")) != NULL; p++) {
        found = p;
    }
    return found != NULL && sscanf(found, "HTTP/1.%*1d %3d", status) == 1 ? found : NULL;
}

static void write_refusal(struct evbuffer *out, int status)
{
    const refusal_t *r = &malformed;
    for (size_t i = 0; i < LK_ARRAY_LEN(refusals); i++) {
        r = refusals[i].from == status ? &refusals[i] : r;
    }
    lk_buf_t json;
    lk_buf_init(&json, 0);
    api_error_json(&json, r->to, r->param, r->message);
    evbuffer_add_printf(out,
                        "HTTP/1.1 %d %s\r\nContent-Type: application/json\r\n"
                        "Content-Length: %zu\r\nConnection: close\r\n\r\n%s",
                        r->to, r->phrase, json.len, lk_buf_cstr(&json));
    lk_buf_fini(&json);
}

/* evhttp adds a page last of all and writes nothing before it returns to its loop. */
static void on_output(struct evbuffer *out, const struct evbuffer_cb_info *info, void *ctx)
{
    char text[MAX_PAGE + 1];
    size_t len = evbuffer_get_length(out);
    int status;
    if (info->n_added == 0 || len > MAX_PAGE || !ends_like_page(out, len)) {
        return;
    }
    evbuffer_copyout(out, text, len);
    text[len] = '\0';
    const char *page = find_page(text, &status);
    if (page == NULL) {
        return;
    }
    evbuffer_unfreeze(out, 1); /* bufferevents keep others from taking their output's front */
    evbuffer_drain(out, len);
    evbuffer_freeze(out, 1);
    evbuffer_add(out, text, (size_t)(page - text));
    write_refusal(out, status);
}

struct bufferevent *http_refusal_bufferevent(struct event_base *base, void *ctx)
{
    struct bufferevent *bev = bufferevent_socket_new(base, -1, 0);
    if (bev != NULL && evbuffer_add_cb(bufferevent_get_output(bev), on_output, NULL) == NULL) {
        bufferevent_free(bev);
        bev = NULL;
    }
    return bev;
}
