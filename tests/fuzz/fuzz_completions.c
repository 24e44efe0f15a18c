/* Fuzz target: the body of POST /v1/completions, with and without a tokenizer. One answer each
 * time, valid JSON or a well-formed stream, and nothing left over. */
#include "tests/fuzz/api_harness.h"

#include <stdio.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const tokenizer_t *byte_tokenizer(void)
{
    static tokenizer_t *tokenizer;
    if (tokenizer == NULL) {
        char dir[] = "/tmp/lk-fuzz-XXXXXX", path[64];
        lk_error_t err = LK_ERROR_INIT;
        CHECK(mkdtemp(dir) != NULL);
        CHECKF(tokenizer_write_bytes(dir, 300, &err) == LK_OK, "%s", err.text);
        CHECKF(tokenizer_load(dir, &tokenizer, &err) == LK_OK, "%s", err.text);
        static const char *const files[] = {"tokenizer.json", "tokenizer_config.json"};
        for (size_t i = 0; i < LK_ARRAY_LEN(files); i++) {
            snprintf(path, sizeof path, "%s/%s", dir, files[i]);
            unlink(path);
        }
        rmdir(dir);
    }
    return tokenizer;
}

static void ask(harness_t *h, const char *body, size_t len)
{
    harness_call_t *call = calloc(1, sizeof *call);
    bool done = false, method_ok;
    char allow[32];
    CHECK(call != NULL);
    call->done = &done;
    call->base =
        (api_call_t){.ops = &harness_ops,
                     .raw_body = body,
                     .raw_len = len,
                     .rank = -1,
                     .route = api_find_route("POST", "/v1/completions", &method_ok, allow)};
    api_dispatch(&h->api, &call->base);
    harness_answer(h);
    CHECK(done);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const tokenizer_t *tokenizers[] = {NULL, byte_tokenizer()};
    for (size_t i = 0; i < LK_ARRAY_LEN(tokenizers); i++) {
        harness_t *h = harness_new(tokenizers[i]);
        ask(h, size > 0 ? (const char *)data : "", size);
        harness_free(h);
    }
    return 0;
}
