/* fixture.h: what the tokenizer's test files share. */
#ifndef LK_TESTS_TOKENIZER_FIXTURE_H
#define LK_TESTS_TOKENIZER_FIXTURE_H

#include "api_frontend/tokenizer/tokenizer.h"
#include "tests/lib/test_main.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

/* Path of a file below tests/fixtures; valid until the fourth call after it. */
static inline const char *fixture_path(const char *relative)
{
    static char paths[4][1024];
    static int next;
    char *path = paths[next++ % 4];
    snprintf(path, sizeof paths[0], "%s/%s", test_fixtures(), relative);
    return path;
}

static inline json_t *fixture_json(const char *relative)
{
    json_error_t why;
    json_t *root = json_load_file(fixture_path(relative), JSON_ALLOW_NUL, &why);
    ck_assert_msg(root != NULL, "%s: %s", relative, why.text);
    return root;
}

static inline tokenizer_t *fixture_tokenizer(const char *path)
{
    lk_error_t err = LK_ERROR_INIT;
    tokenizer_t *t = NULL;
    ck_assert_msg(tokenizer_load(path, &t, &err) == LK_OK, "%s", err.text);
    return t;
}

/* Encodes and compares with a JSON array of ids. */
static inline void fixture_check_ids(const tokenizer_t *t, json_t *text, unsigned flags,
                                     json_t *expected)
{
    lk_error_t err = LK_ERROR_INIT;
    uint32_t *ids;
    size_t n;
    ck_assert_msg(tokenizer_encode(t, json_string_value(text), json_string_length(text), flags,
                                   &ids, &n, &err) == LK_OK,
                  "%s", err.text);
    bool equal = n == json_array_size(expected);
    for (size_t i = 0; equal && i < n; i++) {
        equal = (json_int_t)ids[i] == json_integer_value(json_array_get(expected, i));
    }
    if (!equal) {
        char *want = json_dumps(expected, JSON_COMPACT);
        lk_buf_t got;
        lk_buf_init(&got, 0);
        for (size_t i = 0; i < n; i++) {
            lk_buf_printf(&got, "%u,", ids[i]);
        }
        char *quoted = json_dumps(text, JSON_ENCODE_ANY | JSON_ENSURE_ASCII);
        ck_abort_msg("%.300s (flags %u): expected %.400s, got %.400s", quoted, flags, want,
                     lk_buf_cstr(&got));
    }
    free(ids);
}

#endif
