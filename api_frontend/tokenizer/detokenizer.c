#include "api_frontend/tokenizer/detokenizer.h"
#include "api_frontend/tokenizer/stop_matcher.h"
#include "api_frontend/tokenizer/utf8.h"
#include "base/check.h"

#include <stdlib.h>
#include <string.h>

struct detokenizer {
    const tokenizer_t *tokenizer;
    stop_matcher_t *matcher;
    bool skip_special, include_stop, ended;
    uint32_t min_tokens, n_tokens; /* n_tokens saturates at min_tokens */
    int stop;
    uint8_t partial[4]; /* a proper prefix of a character */
    size_t n_partial;
    lk_buf_t held; /* text not given out yet */
};

lk_status_t detokenizer_new(const tokenizer_t *tokenizer, const detokenizer_options_t *options,
                            detokenizer_t **out, lk_error_t *err)
{
    detokenizer_t *d = calloc(1, sizeof *d);
    if (d == NULL) {
        return lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory for a detokenizer");
    }
    d->tokenizer = tokenizer;
    d->skip_special = options->skip_special;
    d->include_stop = options->include_stop;
    d->min_tokens = options->min_tokens;
    d->stop = -1;
    lk_buf_init(&d->held, 0);
    lk_status_t status = stop_matcher_new(options->stops, options->n_stops, &d->matcher, err);
    if (status != LK_OK) {
        detokenizer_destroy(&d);
        return status;
    }
    *out = d;
    return LK_OK;
}

void detokenizer_destroy(detokenizer_t **detokenizer)
{
    if (*detokenizer != NULL) {
        stop_matcher_destroy(&(*detokenizer)->matcher);
        lk_buf_fini(&(*detokenizer)->held);
        free(*detokenizer);
        *detokenizer = NULL;
    }
}

int detokenizer_stop(const detokenizer_t *d)
{
    return d->stop;
}

/* Takes whole characters. */
static void take_text(detokenizer_t *d, const uint8_t *text, size_t len)
{
    for (size_t i = 0; i < len && !d->ended; i++) {
        lk_buf_append(&d->held, text + i, 1);
        int stop = stop_matcher_step(d->matcher, text[i]);
        if (stop >= 0 && d->n_tokens >= d->min_tokens) {
            size_t n = stop_matcher_length(d->matcher, stop);
            d->stop = stop;
            d->ended = true;
            if (!d->include_stop && !d->held.failed) {
                CHECK(n <= d->held.len);
                d->held.len -= n;
            }
        }
    }
}

/* Takes bytes of a token: whole characters go on as text, U+FFFD replaces what can't be one. */
static void take_bytes(detokenizer_t *d, const uint8_t *bytes, size_t len)
{
    for (size_t i = 0; i < len && !d->ended;) {
        size_t n;
        if (d->n_partial == 0) {
            utf8_kind_t kind = utf8_look(bytes + i, len - i, &n);
            if (kind == UTF8_INCOMPLETE) {
                memcpy(d->partial, bytes + i, n);
                d->n_partial = n;
            } else if (kind == UTF8_VALID) {
                take_text(d, bytes + i, n);
            } else {
                take_text(d, (const uint8_t *)UTF8_REPLACEMENT, 3);
            }
            i += n;
            continue;
        }
        d->partial[d->n_partial] = bytes[i];
        switch (utf8_look(d->partial, d->n_partial + 1, &n)) {
        case UTF8_INCOMPLETE:
            d->n_partial++;
            i++;
            break;
        case UTF8_VALID:
            d->n_partial = 0;
            take_text(d, d->partial, n);
            i++;
            break;
        case UTF8_INVALID: /* the new byte is not part of it: look at that one again */
            d->n_partial = 0;
            take_text(d, (const uint8_t *)UTF8_REPLACEMENT, 3);
            break;
        }
    }
}

/* Moves all but the last `keep` bytes of the held text to out. */
static lk_status_t release(detokenizer_t *d, size_t keep, lk_buf_t *out, lk_error_t *err)
{
    if (d->held.failed) {
        return lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory for the text of a stream");
    }
    CHECK(keep <= d->held.len);
    size_t n = d->held.len - keep;
    lk_buf_append(out, d->held.data, n);
    if (out->failed) {
        return lk_error_set(err, LK_ERR_TOO_LARGE, "the text of a stream does not fit");
    }
    if (n > 0) {
        memmove(d->held.data, d->held.data + n, keep);
        d->held.len = keep;
    }
    return LK_OK;
}

lk_status_t detokenizer_push(detokenizer_t *d, const uint32_t *ids, size_t n, lk_buf_t *out,
                             size_t *n_used, lk_error_t *err)
{
    size_t i = 0;
    for (; i < n && !d->ended; i++) {
        size_t len;
        const uint8_t *bytes = tokenizer_token_bytes(d->tokenizer, ids[i], &len);
        bool skipped = d->skip_special && tokenizer_is_special(d->tokenizer, ids[i]);
        if (bytes != NULL && !skipped) {
            take_bytes(d, bytes, len);
        }
        d->n_tokens += d->n_tokens < d->min_tokens ? 1 : 0;
    }
    LK_RETURN_IF_ERROR(release(d, d->ended ? 0 : stop_matcher_held(d->matcher), out, err));
    if (n_used != NULL) {
        *n_used = i;
    }
    return LK_OK;
}

lk_status_t detokenizer_finish(detokenizer_t *d, lk_buf_t *out, lk_error_t *err)
{
    if (d->n_partial > 0 && !d->ended) {
        d->n_partial = 0;
        take_text(d, (const uint8_t *)UTF8_REPLACEMENT, 3);
    }
    d->ended = true;
    return release(d, 0, out, err);
}
