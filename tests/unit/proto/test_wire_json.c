#include "base/check.h"
#include "base/prng.h"
#include "proto/wire_json.h"
#include "tests/lib/test_main.h"

#include <stdlib.h>
#include <string.h>

static const wire_limits_t limits = {1 << 20, 1 << 16, 16};
static lk_error_t err;

static lk_status_t read_bytes(const void *bytes, size_t len, json_t **out)
{
    wire_doc_t doc = {0};
    err = LK_ERROR_INIT;
    lk_status_t st = wire_doc_init(&doc, bytes, len, &limits, &err);
    if (st == LK_OK) {
        st = wire_to_json(doc.root, out, &err);
    }
    wire_doc_fini(&doc);
    return st;
}

static json_t *random_value(lk_prng_t *prng, int depth)
{
    char key[16];
    json_t *made;
    switch (lk_prng_below(prng, depth > 0 ? 8 : 6)) {
    case 0:
        return json_null();
    case 1:
        return json_boolean((int)lk_prng_below(prng, 2));
    case 2:
        return json_integer((json_int_t)lk_prng_u64(prng));
    case 3:
        return json_integer((json_int_t)lk_prng_below(prng, 300) - 150);
    case 4:
        return json_real(lk_prng_normal(prng));
    case 5:
        return json_string("text \xc3\xa4");
    case 6:
        made = json_array();
        for (uint64_t i = lk_prng_below(prng, 6); i > 0; i--) {
            json_array_append_new(made, random_value(prng, depth - 1));
        }
        return made;
    default:
        made = json_object();
        for (uint64_t i = lk_prng_below(prng, 6); i > 0; i--) {
            snprintf(key, sizeof key, "k%u", (unsigned)lk_prng_below(prng, 100));
            json_object_set_new(made, key, random_value(prng, depth - 1));
        }
        return made;
    }
}

START_TEST(there_and_back)
{
    lk_prng_t prng;
    lk_prng_seed(&prng, test_seed("wire_json"));
    for (int round = 0; round < 500; round++) {
        json_t *value = random_value(&prng, 5), *again = NULL;
        lk_buf_t bytes;
        lk_buf_init(&bytes, 0);
        wire_writer_t writer = wire_writer(&bytes);
        wire_put_json(&writer, value);
        ck_assert_msg(read_bytes(bytes.data, bytes.len, &again) == LK_OK, "%s", err.text);
        ck_assert(json_equal(value, again));
        json_decref(value);
        json_decref(again);
        lk_buf_fini(&bytes);
    }
}
END_TEST

static const struct {
    const char *bytes;
    size_t len;
    const char *text;
} refused[] = {
    {"\xc4\x01x", 3, "kind bin"},
    {"\xd4\x01x", 3, "kind ext"},
    {"\xcf\xff\xff\xff\xff\xff\xff\xff\xff", 9, "not valid here"}, /* 2^64 - 1 */
    {"\xcb\x7f\xf0\x00\x00\x00\x00\x00\x00", 9, "finite"},         /* infinity */
    {"\xa2\xff\xfe", 3, "not UTF-8"},
    {"\xa2"
     "a\0",
     3, "without a NUL"},
    {"\x81\x01\x02", 3, "not UTF-8"}, /* key 1 */
    {"\x82\xa1k\x01\xa1k\x02", 7, "\"k\" comes twice"},
    {"\x92\x01\x81\xa1k\xc4\x00", 7, "kind bin"}, /* deep inside */
};

START_TEST(what_json_has_no_word_for)
{
    json_t *out = NULL;
    ck_assert_int_eq(read_bytes(refused[_i].bytes, refused[_i].len, &out), LK_ERR_INVALID);
    ck_assert_msg(strstr(err.text, refused[_i].text) != NULL, "%s", err.text);
    ck_assert_ptr_null(out);
}
END_TEST

Suite *test_suite(void)
{
    Suite *suite = suite_create("wire_json");
    TCase *tc = tcase_create("wire_json");
    tcase_add_test(tc, there_and_back);
    tcase_add_loop_test(tc, what_json_has_no_word_for, 0, LK_ARRAY_LEN(refused));
    suite_add_tcase(suite, tc);
    return suite;
}
