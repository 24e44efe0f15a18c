#include "base/base64.h"
#include "tests/lib/test_main.h"

#include <stdlib.h>
#include <string.h>

static const char letters[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

START_TEST(every_length_comes_back)
{
    uint8_t bytes[100], back[100];
    char text[BASE64_SIZE(100)];
    size_t n = 0;
    for (size_t i = 0; i < sizeof bytes; i++) {
        bytes[i] = (uint8_t)(i * 151 + 7);
    }
    for (size_t len = 0; len <= sizeof bytes; len++) {
        base64_encode(bytes, len, text);
        ck_assert_uint_eq(strlen(text) + 1, BASE64_SIZE(len));
        ck_assert(base64_decode(text, strlen(text), back, len, &n));
        ck_assert_uint_eq(n, len);
        ck_assert_mem_eq(back, bytes, len);
        ck_assert(len == 0 || !base64_decode(text, strlen(text), back, len - 1, &n));
    }
}
END_TEST

/* Each byte in each place of the last four letters and of those before. */
START_TEST(only_letters_are_taken)
{
    for (int byte = 0; byte < 256; byte++) {
        const char *letter = byte != 0 ? strchr(letters, byte) : NULL;
        for (int place = 0; place < 8; place++) {
            char text[] = "AAAAAAAA";
            uint8_t out[6];
            size_t n = 0;
            text[place] = (char)byte;
            bool pads = byte == '=' && place == 7; /* one byte less */
            ck_assert_int_eq(base64_decode(text, 8, out, sizeof out, &n), letter != NULL || pads);
            if (letter != NULL) {
                uint64_t word = (uint64_t)(letter - letters) << (42 - 6 * place), got = 0;
                for (int i = 0; i < 6; i++) {
                    got = got << 8 | out[i];
                }
                ck_assert_uint_eq(n, 6);
                ck_assert_uint_eq(got, word);
            }
        }
    }
}
END_TEST

START_TEST(what_is_refused)
{
    static const char *const texts[] = {"A",        "AA",       "AAA",  "AAAAA", "=AAA", "A=AA",
                                        "AA=A",     "A===",     "====", "AAB=",  "AB==", "AA==AAAA",
                                        "AAA=AAAA", "AAAA====", "A-AA", "A_AA",  " AAA"};
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        uint8_t out[16];
        size_t n = 0;
        ck_assert_msg(!base64_decode(texts[i], strlen(texts[i]), out, sizeof out, &n), "%s",
                      texts[i]);
    }
}
END_TEST

Suite *test_suite(void)
{
    Suite *suite = suite_create("base64");
    TCase *tcase = tcase_create("base64");
    tcase_add_test(tcase, every_length_comes_back);
    tcase_add_test(tcase, only_letters_are_taken);
    tcase_add_test(tcase, what_is_refused);
    suite_add_tcase(suite, tcase);
    return suite;
}
