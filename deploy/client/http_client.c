#include "deploy/client/http_client.h"
#include "base/check.h"

#include <curl/curl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define REPLY_LIMIT (256u << 20)

void http_reply_fini(http_reply_t *reply)
{
    lk_buf_fini(&reply->body);
}

static size_t append(char *data, size_t size, size_t n, void *ctx)
{
    lk_buf_t *buf = ctx;
    lk_buf_append(buf, data, size * n);
    return buf->failed ? 0 : size * n;
}

/* Headers every request has. Caller frees the list. */
static struct curl_slist *headers(const char *key, bool body)
{
    struct curl_slist *list = NULL;
    if (body) {
        list = curl_slist_append(list, "Content-Type: application/json");
    }
    list = curl_slist_append(list, "Expect:"); /* no 100-continue round trip */
    if (key != NULL) {
        char line[512];
        snprintf(line, sizeof line, "Authorization: Bearer %s", key);
        list = curl_slist_append(list, line);
    }
    return list;
}

lk_status_t http_call(const char *method, const char *url, const char *body, const char *key,
                      double timeout_s, http_reply_t *out, lk_error_t *err)
{
    return http_call_with(method, url, body, key, NULL, timeout_s, out, err);
}

lk_status_t http_call_with(const char *method, const char *url, const char *body, const char *key,
                           const char *const *more, double timeout_s, http_reply_t *out,
                           lk_error_t *err)
{
    memset(out, 0, sizeof *out);
    lk_buf_init(&out->body, REPLY_LIMIT);
    CURL *curl = curl_easy_init();
    if (curl == NULL) {
        return lk_error_set(err, LK_ERR_NO_MEMORY, "no memory for a request");
    }
    struct curl_slist *list = headers(key, body != NULL);
    for (; more != NULL && *more != NULL; more++) {
        list = curl_slist_append(list, *more);
    }
    curl_easy_setopt(curl, CURLOPT_URL, url);
    curl_easy_setopt(curl, CURLOPT_HTTPHEADER, list);
    curl_easy_setopt(curl, CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(curl, CURLOPT_PROXY, "");
    curl_easy_setopt(curl, CURLOPT_TIMEOUT_MS, (long)(timeout_s * 1000));
    curl_easy_setopt(curl, CURLOPT_WRITEFUNCTION, append);
    curl_easy_setopt(curl, CURLOPT_WRITEDATA, &out->body);
    if (strcmp(method, "GET") != 0) {
        curl_easy_setopt(curl, CURLOPT_POST, 1L);
        curl_easy_setopt(curl, CURLOPT_POSTFIELDS, body != NULL ? body : "");
        curl_easy_setopt(curl, CURLOPT_POSTFIELDSIZE_LARGE,
                         (curl_off_t)(body != NULL ? strlen(body) : 0));
        curl_easy_setopt(curl, CURLOPT_CUSTOMREQUEST, method);
    }
    CURLcode rc = curl_easy_perform(curl);
    long status = 0;
    curl_easy_getinfo(curl, CURLINFO_RESPONSE_CODE, &status);
    out->status = (int)status;
    curl_slist_free_all(list);
    curl_easy_cleanup(curl);
    if (rc == CURLE_OPERATION_TIMEDOUT) {
        return lk_error_set(err, LK_ERR_TIMEOUT, "%s %s: no reply within %.1f s", method, url,
                            timeout_s);
    }
    if (rc != CURLE_OK) {
        return lk_error_set(err, LK_ERR_PEER, "%s %s: %s", method, url, curl_easy_strerror(rc));
    }
    return LK_OK;
}

struct http_stream {
    CURL *curl;
    struct curl_slist *headers;
    char *body;
    http_stream_events_t events;
    void *ctx;
    lk_buf_t line;  /* bytes of an unfinished line */
    lk_buf_t other; /* a reply that is no event stream */
    struct http_stream *prev, *next;
};

struct http_streams {
    CURLM *multi;
    http_stream_t *first;
    size_t count;
};

http_streams_t *http_streams_new(void)
{
    http_streams_t *self = calloc(1, sizeof *self);
    if (self != NULL) {
        self->multi = curl_multi_init();
        CHECK(self->multi != NULL);
        /* A connection per stream: a queued stream would look like a stalled server. */
        curl_multi_setopt(self->multi, CURLMOPT_MAX_TOTAL_CONNECTIONS, 0L);
    }
    return self;
}

static void stream_free(http_streams_t *self, http_stream_t *s)
{
    curl_multi_remove_handle(self->multi, s->curl);
    curl_easy_cleanup(s->curl);
    curl_slist_free_all(s->headers);
    free(s->body);
    lk_buf_fini(&s->line);
    lk_buf_fini(&s->other);
    if (s->prev != NULL) {
        s->prev->next = s->next;
    } else {
        self->first = s->next;
    }
    if (s->next != NULL) {
        s->next->prev = s->prev;
    }
    self->count--;
    free(s);
}

void http_streams_destroy(http_streams_t **self_p)
{
    if (self_p == NULL || *self_p == NULL) {
        return;
    }
    while ((*self_p)->first != NULL) {
        stream_free(*self_p, (*self_p)->first);
    }
    curl_multi_cleanup((*self_p)->multi);
    free(*self_p);
    *self_p = NULL;
}

/* Cuts complete lines out of what has arrived. */
static void take_lines(http_stream_t *s)
{
    size_t start = 0;
    for (size_t i = 0; i < s->line.len; i++) {
        if (s->line.data[i] != '\n') {
            continue;
        }
        size_t end = i > start && s->line.data[i - 1] == '\r' ? i - 1 : i;
        char *text = (char *)s->line.data + start;
        if (end - start > 6 && memcmp(text, "data: ", 6) == 0) {
            s->line.data[end] = '\0';
            s->events.data(s->ctx, text + 6, end - start - 6);
        }
        start = i + 1;
    }
    memmove(s->line.data, s->line.data + start, s->line.len - start);
    s->line.len -= start;
}

static size_t on_bytes(char *data, size_t size, size_t n, void *ctx)
{
    http_stream_t *s = ctx;
    char *type = NULL;
    curl_easy_getinfo(s->curl, CURLINFO_CONTENT_TYPE, &type);
    if (type == NULL || strncmp(type, "text/event-stream", 17) != 0) {
        lk_buf_append(&s->other, data, size * n);
        return s->other.failed ? 0 : size * n;
    }
    lk_buf_append(&s->line, data, size * n);
    if (s->line.failed) {
        return 0;
    }
    if (s->line.len > 0) {
        take_lines(s);
    }
    return size * n;
}

http_stream_t *http_streams_post(http_streams_t *self, const char *url, const char *body,
                                 const char *key, const http_stream_events_t *events, void *ctx)
{
    http_stream_t *s = calloc(1, sizeof *s);
    if (s == NULL) {
        return NULL;
    }
    s->events = *events;
    s->ctx = ctx;
    s->body = strdup(body);
    s->headers = headers(key, true);
    s->curl = curl_easy_init();
    CHECK(s->body != NULL && s->curl != NULL);
    lk_buf_init(&s->line, REPLY_LIMIT);
    lk_buf_init(&s->other, REPLY_LIMIT);
    curl_easy_setopt(s->curl, CURLOPT_URL, url);
    curl_easy_setopt(s->curl, CURLOPT_HTTPHEADER, s->headers);
    curl_easy_setopt(s->curl, CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(s->curl, CURLOPT_PROXY, "");
    curl_easy_setopt(s->curl, CURLOPT_POSTFIELDS, s->body);
    curl_easy_setopt(s->curl, CURLOPT_WRITEFUNCTION, on_bytes);
    curl_easy_setopt(s->curl, CURLOPT_WRITEDATA, s);
    curl_easy_setopt(s->curl, CURLOPT_PRIVATE, s);
    s->next = self->first;
    if (s->next != NULL) {
        s->next->prev = s;
    }
    self->first = s;
    self->count++;
    curl_multi_add_handle(self->multi, s->curl);
    return s;
}

void http_streams_cancel(http_streams_t *self, http_stream_t *stream)
{
    stream_free(self, stream);
}

size_t http_streams_poll(http_streams_t *self, int timeout_ms)
{
    int running;
    curl_multi_perform(self->multi, &running);
    curl_multi_poll(self->multi, NULL, 0, timeout_ms, NULL);
    curl_multi_perform(self->multi, &running);
    CURLMsg *msg;
    int left;
    while ((msg = curl_multi_info_read(self->multi, &left)) != NULL) {
        if (msg->msg != CURLMSG_DONE) {
            continue;
        }
        http_stream_t *s = NULL;
        long status = 0;
        curl_easy_getinfo(msg->easy_handle, CURLINFO_PRIVATE, (char **)&s);
        curl_easy_getinfo(msg->easy_handle, CURLINFO_RESPONSE_CODE, &status);
        const char *error =
            msg->data.result == CURLE_OK ? "" : curl_easy_strerror(msg->data.result);
        s->events.end(s->ctx, (int)status, error, lk_buf_cstr(&s->other));
        stream_free(self, s);
    }
    return self->count;
}
