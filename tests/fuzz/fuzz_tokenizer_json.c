/*
 * Fuzz target: tokenizer.json, tokenizer_config.json and a text, with a NUL byte between them (the
 * last two may be missing). Whatever loads has to encode, and a streamed decoding has to equal the
 * whole one. Build with -fsanitize=fuzzer, or link with a replay of corpus files.
 */
#include "api_frontend/tokenizer/detokenizer.h"
#include "api_frontend/tokenizer/utf8.h"
#include "base/check.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const char default_text[] =
    "Hello, world's  12 \n\n e\xCC\x81\xEA\xB0\x80 <|eos|> \xE2\x80\xA8x";

/* Splits off the part up to the next NUL byte; NULL if nothing is left. */
static const char *next_part(const char **rest, size_t *left, size_t *len)
{
    const char *part = *rest;
    if (part == NULL) {
        return NULL;
    }
    const char *end = memchr(part, '\0', *left);
    *len = end == NULL ? *left : (size_t)(end - part);
    *left -= end == NULL ? *left : *len + 1;
    *rest = end == NULL ? NULL : end + 1;
    return part;
}

static void check_stream(const tokenizer_t *t, const uint32_t *ids, size_t n)
{
    static const char *const stops[] = {"\n\n", "world"};
    lk_buf_t whole, streamed;
    lk_buf_init(&whole, 0);
    lk_buf_init(&streamed, 0);
    tokenizer_decode(t, ids, n, true, &whole);
    for (size_t n_stops = 0; n_stops <= 2; n_stops += 2) {
        detokenizer_options_t options = {.skip_special = true, .stops = stops, .n_stops = n_stops};
        detokenizer_t *d;
        lk_buf_clear(&streamed);
        CHECK(detokenizer_new(t, &options, &d, NULL) == LK_OK);
        for (size_t i = 0; i < n; i++) {
            CHECK(detokenizer_push(d, ids + i, 1, &streamed, NULL, NULL) == LK_OK);
            CHECK(utf8_check((const char *)streamed.data, streamed.len, NULL));
        }
        CHECK(detokenizer_finish(d, &streamed, NULL) == LK_OK);
        CHECK(streamed.len <= whole.len);
        CHECK(streamed.len == 0 || memcmp(streamed.data, whole.data, streamed.len) == 0);
        CHECK(detokenizer_stop(d) >= 0 || streamed.len == whole.len);
        detokenizer_destroy(&d);
    }
    lk_buf_fini(&whole);
    lk_buf_fini(&streamed);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const char *rest = (const char *)data;
    size_t json_len = 0, config_len = 0, text_len = 0;
    const char *json = next_part(&rest, &size, &json_len);
    const char *config = next_part(&rest, &size, &config_len);
    const char *text = next_part(&rest, &size, &text_len);
    if (text == NULL) {
        text = default_text;
        text_len = sizeof default_text - 1;
    }
    tokenizer_t *t = NULL;
    lk_error_t err = LK_ERROR_INIT;
    if (json == NULL || tokenizer_parse(json, json_len, config, config_len, &t, &err) != LK_OK) {
        CHECK(t == NULL && (json == NULL || err.text[0] != '\0'));
        return 0;
    }
    for (unsigned flags = 0; flags < 4; flags += 3) { /* neither and both */
        uint32_t *ids;
        size_t n;
        if (tokenizer_encode(t, text, text_len, flags, &ids, &n, &err) == LK_OK) {
            for (size_t i = 0; i < n; i++) {
                CHECK(ids[i] < tokenizer_vocab_size(t));
            }
            check_stream(t, ids, n);
            free(ids);
        }
    }
    tokenizer_destroy(&t);
    return 0;
}
