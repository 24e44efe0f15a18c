#include "api_frontend/tokenizer/pretokenizer.h"
#include "base/buf.h"
#include "base/check.h"

#include <stdlib.h>
#include <string.h>

/* The pattern that byte-level BPE was published with, in the form its files' readers use. */
#define GPT2_PATTERN                                                                               \
    "'(?:[sdmt]|ll|ve|re)| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"

static const char *const behavior_names[] = {
#define X(name, value) name,
    PRETOKENIZER_BEHAVIOR_TABLE(X)
#undef X
};

pretokenizer_behavior_t pretokenizer_behavior_by_name(const char *name)
{
    size_t i = 0;
    while (i < LK_ARRAY_LEN(behavior_names) && strcmp(behavior_names[i], name) != 0) {
        i++;
    }
    return (pretokenizer_behavior_t)i;
}

lk_status_t pretokenizer_add(pretokenizer_t *p, const pretokenizer_step_t *step, lk_error_t *err)
{
    if (p->n_steps == PRETOKENIZER_MAX_STEPS) {
        split_regex_t *regex = step->regex;
        split_regex_destroy(&regex);
        return lk_error_set(err, LK_ERR_INVALID, "more than %d steps", PRETOKENIZER_MAX_STEPS);
    }
    p->steps[p->n_steps++] = *step;
    return LK_OK;
}

lk_status_t pretokenizer_add_byte_level(pretokenizer_t *p, bool add_prefix_space, bool use_regex,
                                        lk_error_t *err)
{
    p->add_prefix_space = add_prefix_space;
    p->prefix_before = p->n_steps;
    p->is_complete = true;
    if (!use_regex) {
        return LK_OK;
    }
    pretokenizer_step_t step = {.behavior = PRETOKENIZER_ISOLATED};
    LK_RETURN_IF_ERROR(split_regex_new(GPT2_PATTERN, false, &step.regex, err));
    return pretokenizer_add(p, &step, err);
}

void pretokenizer_fini(pretokenizer_t *p)
{
    for (uint32_t i = 0; i < p->n_steps; i++) {
        split_regex_destroy(&p->steps[i].regex);
    }
    memset(p, 0, sizeof *p);
}

/* Part of a text; `match` is set by a split, before its behaviour is applied. */
typedef struct {
    uint32_t start, end;
    bool match;
} span_t;

typedef struct {
    span_t *data;
    size_t len, cap;
} spans_t;

static lk_status_t push(spans_t *spans, size_t start, size_t end, bool match, lk_error_t *err)
{
    if (spans->len == spans->cap) {
        size_t cap = spans->cap == 0 ? 64 : spans->cap * 2;
        span_t *data = realloc(spans->data, cap * sizeof *data);
        if (data == NULL) {
            return lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory for the text's pieces");
        }
        spans->data = data;
        spans->cap = cap;
    }
    spans->data[spans->len++] =
        (span_t){.start = (uint32_t)start, .end = (uint32_t)end, .match = match};
    return LK_OK;
}

/* Joins a[0..n) by the behaviour, in place; returns the new n. A match (or, for Contiguous, an
 * equal neighbour) that follows a non-match joins the piece before it. */
static size_t join_left(span_t *a, size_t n, bool contiguous)
{
    bool previous = false;
    size_t out = 0;
    for (size_t i = 0; i < n; i++) {
        bool match = a[i].match;
        bool join = contiguous ? match == previous : match && !previous;
        if (join && out > 0) {
            a[out - 1].end = a[i].end;
        } else {
            a[out++] = a[i];
        }
        previous = match;
    }
    return out;
}

static size_t join_right(span_t *a, size_t n)
{
    bool previous = false;
    size_t out = n; /* a[out..n) is done */
    for (size_t i = n; i-- > 0;) {
        bool match = a[i].match;
        if (match && !previous && out < n) {
            a[out].start = a[i].start;
        } else {
            a[--out] = a[i];
        }
        previous = match;
    }
    memmove(a, a + out, (n - out) * sizeof *a);
    return n - out;
}

static size_t apply_behavior(const pretokenizer_step_t *step, span_t *a, size_t n)
{
    switch (step->behavior) {
    case PRETOKENIZER_MERGED_WITH_PREVIOUS:
        n = join_left(a, n, false);
        break;
    case PRETOKENIZER_CONTIGUOUS:
        n = join_left(a, n, true);
        break;
    case PRETOKENIZER_MERGED_WITH_NEXT:
        n = join_right(a, n);
        break;
    default:
        break;
    }
    bool removed = step->behavior == PRETOKENIZER_REMOVED;
    size_t out = 0;
    for (size_t i = 0; i < n; i++) {
        if (a[i].start < a[i].end && !(removed && a[i].match)) {
            a[out++] = a[i];
        }
    }
    return out;
}

static lk_status_t split(const pretokenizer_step_t *step, split_search_t *search, const char *text,
                         span_t piece, spans_t *out, lk_error_t *err)
{
    size_t first = out->len, from = 0, last = SIZE_MAX, done = 0, start, end;
    const char *p = text + piece.start;
    size_t len = piece.end - piece.start;
    for (;;) {
        lk_status_t status =
            split_search_next(search, step->regex, p, len, &from, &last, &start, &end, err);
        if (status == LK_ERR_NOT_FOUND) {
            break;
        }
        LK_RETURN_IF_ERROR(status);
        if (done != start) {
            LK_RETURN_IF_ERROR(
                push(out, piece.start + done, piece.start + start, step->invert, err));
        }
        LK_RETURN_IF_ERROR(push(out, piece.start + start, piece.start + end, !step->invert, err));
        done = end;
    }
    if (done != len) {
        LK_RETURN_IF_ERROR(push(out, piece.start + done, piece.end, step->invert, err));
    }
    out->len = first + apply_behavior(step, out->data + first, out->len - first);
    return LK_OK;
}

/* Copies the pieces into *joined, each with a space in front if it has none. */
static lk_status_t add_spaces(const char *text, spans_t *spans, lk_buf_t *joined, lk_error_t *err)
{
    for (size_t i = 0; i < spans->len; i++) {
        span_t *s = &spans->data[i];
        size_t at = joined->len;
        if (text[s->start] != ' ') {
            lk_buf_append(joined, " ", 1);
        }
        lk_buf_append(joined, text + s->start, s->end - s->start);
        s->start = (uint32_t)at;
        s->end = (uint32_t)joined->len;
    }
    if (joined->failed) {
        return lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory for the text's pieces");
    }
    return LK_OK;
}

lk_status_t pretokenizer_run(const pretokenizer_t *p, split_search_t *search, const char *text,
                             size_t len, pretokenizer_word_fn word, void *ctx, lk_error_t *err)
{
    CHECK(len < 1u << 30); /* added spaces can double it */
    spans_t spans = {0}, next = {0};
    lk_buf_t joined;
    lk_buf_init(&joined, 0);
    lk_status_t status = len == 0 ? LK_OK : push(&spans, 0, len, false, err);
    for (uint32_t i = 0; i <= p->n_steps && status == LK_OK; i++) {
        if (i == p->prefix_before && p->add_prefix_space) {
            status = add_spaces(text, &spans, &joined, err);
            text = (const char *)joined.data;
        }
        if (i == p->n_steps) {
            break;
        }
        next.len = 0;
        for (size_t k = 0; k < spans.len && status == LK_OK; k++) {
            status = split(&p->steps[i], search, text, spans.data[k], &next, err);
        }
        spans_t swap = spans;
        spans = next;
        next = swap;
    }
    for (size_t k = 0; k < spans.len && status == LK_OK; k++) {
        span_t s = spans.data[k];
        status = word(ctx, text + s.start, s.end - s.start, err);
    }
    free(spans.data);
    free(next.data);
    lk_buf_fini(&joined);
    return status;
}
