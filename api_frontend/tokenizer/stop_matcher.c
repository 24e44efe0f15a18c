#include "api_frontend/tokenizer/stop_matcher.h"
#include "api_frontend/tokenizer/utf8.h"
#include "base/check.h"

#include <stdlib.h>
#include <string.h>

/* fail[k]: length of the longest proper prefix of text that is a suffix of its first k bytes */
typedef struct {
    const char *text;
    const uint32_t *fail; /* [len + 1] */
    uint32_t len, state;
} stop_t;

struct stop_matcher {
    size_t n;
    stop_t *stops;
    char *texts;
    uint32_t *fails;
};

static void fill_fail(const char *text, uint32_t len, uint32_t *fail)
{
    uint32_t k = 0;
    fail[0] = 0;
    fail[1] = 0;
    for (uint32_t i = 1; i < len; i++) {
        while (k > 0 && text[i] != text[k]) {
            k = fail[k];
        }
        k += text[i] == text[k];
        fail[i + 1] = k;
    }
}

lk_status_t stop_matcher_new(const char *const *strings, size_t n, stop_matcher_t **out,
                             lk_error_t *err)
{
    size_t total = 0;
    if (n > STOP_MATCHER_MAX_STRINGS) {
        return lk_error_set(err, LK_ERR_INVALID, "stop has %zu strings, allowed are %d", n,
                            STOP_MATCHER_MAX_STRINGS);
    }
    for (size_t i = 0; i < n; i++) {
        size_t len = strlen(strings[i]);
        total += len;
        if (len == 0 || total > STOP_MATCHER_MAX_BYTES || !utf8_check(strings[i], len, NULL)) {
            return lk_error_set(err, LK_ERR_INVALID, "stop[%zu] %s", i,
                                len == 0                         ? "is empty"
                                : total > STOP_MATCHER_MAX_BYTES ? "makes the stop strings too long"
                                                                 : "is not UTF-8");
        }
    }
    stop_matcher_t *m = calloc(1, sizeof *m);
    if (m == NULL) {
        goto err_no_memory;
    }
    m->n = n;
    m->stops = calloc(n + 1, sizeof *m->stops);
    m->texts = malloc(total + 1);
    m->fails = malloc((total + n + 1) * sizeof *m->fails);
    if (m->stops == NULL || m->texts == NULL || m->fails == NULL) {
        goto err_destroy;
    }
    char *text = m->texts;
    uint32_t *fail = m->fails;
    for (size_t i = 0; i < n; i++) {
        uint32_t len = (uint32_t)strlen(strings[i]);
        memcpy(text, strings[i], len);
        fill_fail(text, len, fail);
        m->stops[i] = (stop_t){.text = text, .fail = fail, .len = len};
        text += len;
        fail += len + 1;
    }
    *out = m;
    return LK_OK;
err_destroy:
    stop_matcher_destroy(&m);
err_no_memory:
    return lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory for the stop strings");
}

void stop_matcher_destroy(stop_matcher_t **matcher)
{
    if (*matcher != NULL) {
        free((*matcher)->stops);
        free((*matcher)->texts);
        free((*matcher)->fails);
        free(*matcher);
        *matcher = NULL;
    }
}

int stop_matcher_step(stop_matcher_t *matcher, uint8_t byte)
{
    int found = -1;
    for (size_t i = 0; i < matcher->n; i++) {
        stop_t *s = &matcher->stops[i];
        while (s->state > 0 && (uint8_t)s->text[s->state] != byte) {
            s->state = s->fail[s->state];
        }
        s->state += (uint8_t)s->text[s->state] == byte;
        if (s->state == s->len) {
            s->state = s->fail[s->len];
            if (found < 0 || s->len > matcher->stops[found].len) {
                found = (int)i;
            }
        }
    }
    return found;
}

size_t stop_matcher_held(const stop_matcher_t *matcher)
{
    size_t held = 0;
    for (size_t i = 0; i < matcher->n; i++) {
        held = LK_MAX(held, (size_t)matcher->stops[i].state);
    }
    return held;
}

size_t stop_matcher_length(const stop_matcher_t *matcher, int index)
{
    CHECK(index >= 0 && (size_t)index < matcher->n);
    return matcher->stops[index].len;
}
