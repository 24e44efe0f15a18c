#include "base/check.h"
#include "base/hash.h"
#include "tests/lib/test_main.h"
#include "tests/unit/exec/model_fixture.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void sha256_hex(const void *data, size_t len, char out[65])
{
    uint8_t sum[32];
    lk_sha256(data, len, sum);
    for (int i = 0; i < 32; i++) {
        snprintf(out + 2 * i, 3, "%02x", sum[i]);
    }
}

/* Values, not bytes: `b` may be stored in another dtype and on a rank without some experts. */
static void assert_same_weights(const weight_table_t *a, const weight_table_t *b)
{
    ck_assert_uint_eq(weight_table_count(a), weight_table_count(b));
    for (size_t i = 0; i < weight_table_count(a); i++) {
        const weight_slot_t *x = weight_table_at(a, i), *y = weight_table_at(b, i);
        ck_assert_str_eq(x->name, y->name);
        ck_assert_msg(x->loaded && y->loaded && digest_equal(x->digest, y->digest), "%s", x->name);
        if (x->data == NULL || y->data == NULL) {
            continue;
        }
        float *fx = calloc(x->numel, 4), *fy = calloc(x->numel, 4);
        ck_ok(dtype_convert(fx, LK_DTYPE_F32, x->data, weight_table_dtype(a), x->numel));
        ck_ok(dtype_convert(fy, LK_DTYPE_F32, y->data, weight_table_dtype(b), x->numel));
        ck_assert_mem_eq(fx, fy, x->numel * 4);
        free(fx);
        free(fy);
    }
    ck_assert(digest_equal(weight_table_digest(a), weight_table_digest(b)));
}

/* The set's digest is the formula over the slots, and each slot's that of its bytes. */
static void assert_digest_is_honest(const weight_table_t *table)
{
    digest_t set = {{0, 0}};
    for (size_t i = 0; i < weight_table_count(table); i++) {
        const weight_slot_t *slot = weight_table_at(table, i);
        lk_dtype_t dtype = weight_table_dtype(table);
        digest_t digest = {{0, 0}};
        if (slot->data != NULL) {
            ck_ok(digest_add(&digest, slot->data, dtype, dtype, slot->numel, 0));
            ck_assert_msg(digest_equal(digest, slot->digest), "%s", slot->name);
        }
        digest_set_add(&set, slot->name, slot->digest);
    }
    ck_assert(digest_equal(set, weight_table_digest(table)));
}

/* The bytes in the table are those that the trainer's own hashes name, fused tensors included. */
START_TEST(fixture_loads_as_the_trainer_has_it)
{
    const char *name = model_fixtures[_i];
    weight_table_t *table = model_fixture_load(name, LK_DTYPE_BF16, 0, 1);
    trainer_list_t list;
    trainer_list_init(&list, name, table);
    for (size_t i = 0; i < list.n; i++) {
        char hex[65];
        uint64_t bytes;
        ck_assert(tensor_desc_bytes(&list.descs[i], &bytes));
        sha256_hex(list.data[i], bytes, hex);
        ck_assert_msg(strcmp(hex, list.sha256[i]) == 0, "%s", list.descs[i].name);
    }
    assert_digest_is_honest(table);
    trainer_list_fini(&list);
    weight_table_destroy(&table);
    ck_assert_ptr_null(table);
}
END_TEST

Suite *test_suite(void)
{
    Suite *suite = suite_create("weight_table");
    TCase *each = tcase_create("each_fixture");
    tcase_add_loop_test(each, fixture_loads_as_the_trainer_has_it, 0, N_MODEL_FIXTURES);
    suite_add_tcase(suite, each);
    (void)assert_same_weights;
    return suite;
}
