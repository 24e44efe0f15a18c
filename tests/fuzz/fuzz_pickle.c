/*
 * Fuzz target: pickles of strangers. Whatever is accepted must have in-range items and closed
 * containers, and what is refused must say why.
 */
#include "base/check.h"
#include "transfer/pickle.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Follows one path from the root, picked by the input: a walk over all of it may take forever. */
static void follow(const pickle_value_t *value, const uint8_t *data, size_t size)
{
    unsigned depth = value->depth;
    CHECK(depth <= PICKLE_MAX_DEPTH);
    for (size_t i = 0;; i++) {
        CHECK(pickle_type_name(value->type)[0] != '?');
        if (value->type == PICKLE_STR || value->type == PICKLE_BYTES) {
            CHECK(value->bytes >= data && value->bytes + value->len <= data + size);
            return;
        }
        if (value->type == PICKLE_DICT) {
            CHECK(value->n % 2 == 0 && (value->n == 0 || value->items[0]->type == PICKLE_STR));
        }
        if (value->type < PICKLE_TUPLE || value->type == PICKLE_GLOBAL || value->n == 0) {
            return;
        }
        value = value->items[data[i % size] % value->n];
        CHECK(value->depth < depth);
        depth = value->depth;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    lk_error_t err = LK_ERROR_INIT;
    uint8_t id[NCCL_ID_BYTES];
    if (pickle_unique_id(data, size, id, &err) < 0) {
        CHECK(err.status < 0 && err.text[0] != '\0');
    }
    pickle_t *pickle = NULL;
    err = LK_ERROR_INIT;
    lk_status_t st =
        pickle_parse(data, size, pickle_globals_ipc, pickle_n_globals_ipc, &pickle, &err);
    CHECK((st == LK_OK) == (pickle != NULL));
    if (st < 0) {
        CHECK(err.status == st && err.text[0] != '\0');
        return 0;
    }
    follow(pickle_root(pickle), data, size);
    pickle_destroy(&pickle);
    return 0;
}
