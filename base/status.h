/*
 * status.h: the one status enum, and the error text that travels with it.
 *
 * OK is 0, "not yet" is 1, failures are negative. The function that first decides that something
 * is an error writes the text; callers only pass it on. Outputs are written only on success.
 */
#ifndef LK_BASE_STATUS_H
#define LK_BASE_STATUS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* name, value, HTTP status that a front end answers with, meaning */
#define LK_STATUS_TABLE(X)                                                                         \
    X(OK, 0, 200, "ok")                                                                            \
    X(INPROGRESS, 1, 202, "not finished yet")                                                      \
    X(ERR_INVALID, -1, 400, "bad input of a caller")                                               \
    X(ERR_UNSUPPORTED, -2, 400, "valid, but not supported here")                                   \
    X(ERR_UNAUTHORIZED, -3, 401, "missing or wrong key")                                           \
    X(ERR_NOT_FOUND, -4, 404, "no such thing")                                                     \
    X(ERR_STATE, -5, 409, "not in this state; nothing was changed")                                \
    X(ERR_TOO_LARGE, -6, 413, "over a limit")                                                      \
    X(ERR_UNAVAILABLE, -7, 503, "not now, try again")                                              \
    X(ERR_TIMEOUT, -8, 504, "a deadline passed")                                                   \
    X(ERR_PEER, -9, 502, "a peer died, closed or broke the protocol")                              \
    X(ERR_IO, -10, 500, "the operating system refused")                                            \
    X(ERR_NO_MEMORY, -11, 500, "out of memory")                                                    \
    X(ERR_CANCELED, -12, 409, "aborted by a caller or overtaken by another call")                  \
    X(ERR_INTERNAL, -13, 500, "a defect of this program")

typedef enum {
#define X(name, value, http, text) LK_##name = value,
    LK_STATUS_TABLE(X)
#undef X
} lk_status_value_t;

/* warn_unused_result sits on functions through LK_MUST_USE. */
typedef lk_status_value_t lk_status_t;
#define LK_MUST_USE __attribute__((warn_unused_result))

#define LK_ERROR_TEXT_MAX 1024

/* An error with its text. `text` is always terminated and is valid UTF-8 if its inputs were. */
typedef struct {
    lk_status_t status;
    char text[LK_ERROR_TEXT_MAX];
} lk_error_t;

#define LK_ERROR_INIT ((lk_error_t){.status = LK_OK})

/* "ERR_INVALID" and so on; "?" for a value outside the table. */
const char *lk_status_name(lk_status_t status);
/* True if `value` (from the wire) is one of the table's. */
bool lk_status_is_valid(int64_t value);
int lk_status_http(lk_status_t status);

/* snprintf, but what does not fit is cut between two characters, not inside of one: a text that was
 * UTF-8 still is. For everything that may get into a reply or a message. */
void lk_text(char *out, size_t room, const char *fmt, ...) __attribute__((format(printf, 3, 4)));

/* Writes status and text into *err (which may be NULL) and returns status. Cuts long texts. */
lk_status_t lk_error_set(lk_error_t *err, lk_status_t status, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

/* Puts "PREFIX: " before the text already in *err. Returns err->status. */
lk_status_t lk_error_prefix(lk_error_t *err, const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));

#define LK_RETURN_IF_ERROR(expr)                                                                   \
    do {                                                                                           \
        lk_status_t lk_rie_ = (expr);                                                              \
        if (lk_rie_ < 0) {                                                                         \
            return lk_rie_;                                                                        \
        }                                                                                          \
    } while (0)

#endif
