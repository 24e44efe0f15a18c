/*
 * check.h: assertions. They stay on in every build: a broken invariant must stop the process
 * rather than generate text from it.
 */
#ifndef LK_BASE_CHECK_H
#define LK_BASE_CHECK_H

#include <stdnoreturn.h>

/* Prints the text with its place and aborts. */
noreturn void lk_check_failed(const char *file, int line, const char *what, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));

/* Internal invariant. Never use it on input from a file or a socket: that is an lk_error_t. */
#define CHECK(cond)                                                                                \
    do {                                                                                           \
        if (__builtin_expect(!(cond), 0)) {                                                        \
            lk_check_failed(__FILE__, __LINE__, #cond, "%s", "");                                  \
        }                                                                                          \
    } while (0)

/* Same with a printf-style explanation. */
#define CHECKF(cond, ...)                                                                          \
    do {                                                                                           \
        if (__builtin_expect(!(cond), 0)) {                                                        \
            lk_check_failed(__FILE__, __LINE__, #cond, __VA_ARGS__);                               \
        }                                                                                          \
    } while (0)

#define STATIC_ASSERT(cond, text) _Static_assert(cond, text)

#define LK_ARRAY_LEN(a) (sizeof(a) / sizeof((a)[0]))
#define LK_MIN(a, b) ((a) < (b) ? (a) : (b))
#define LK_MAX(a, b) ((a) > (b) ? (a) : (b))

#endif
