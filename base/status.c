#include "base/status.h"
#include "base/check.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct {
    lk_status_t status;
    int http;
    const char *name;
} status_rows[] = {
#define X(name, value, http, text) {LK_##name, http, #name},
    LK_STATUS_TABLE(X)
#undef X
};

const char *lk_status_name(lk_status_t status)
{
    for (size_t i = 0; i < LK_ARRAY_LEN(status_rows); i++) {
        if (status_rows[i].status == status) {
            return status_rows[i].name;
        }
    }
    return "?";
}

bool lk_status_is_valid(int64_t value)
{
    for (size_t i = 0; i < LK_ARRAY_LEN(status_rows); i++) {
        if ((int64_t)status_rows[i].status == value) {
            return true;
        }
    }
    return false;
}

int lk_status_http(lk_status_t status)
{
    for (size_t i = 0; i < LK_ARRAY_LEN(status_rows); i++) {
        if (status_rows[i].status == status) {
            return status_rows[i].http;
        }
    }
    return 500;
}

/* Cuts an unfinished UTF-8 sequence off the end, so that a cut text stays valid. */
static void trim_utf8(char *text)
{
    size_t n = strlen(text);
    size_t back = 0;
    while (back < 4 && back < n && ((unsigned char)text[n - 1 - back] & 0xC0) == 0x80) {
        back++;
    }
    if (back < n) {
        unsigned char lead = (unsigned char)text[n - 1 - back];
        size_t want = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : lead >= 0xC0 ? 2 : 1;
        if (want > back + 1) {
            text[n - 1 - back] = '\0';
        }
    }
}

void lk_text(char *out, size_t room, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(out, room, fmt, ap);
    va_end(ap);
    if (n >= 0 && (size_t)n >= room && room > 0) {
        trim_utf8(out);
    }
}

lk_status_t lk_error_set(lk_error_t *err, lk_status_t status, const char *fmt, ...)
{
    if (err != NULL) {
        char text[LK_ERROR_TEXT_MAX]; /* the arguments may point into err->text */
        va_list ap;
        va_start(ap, fmt);
        int n = vsnprintf(text, sizeof text, fmt, ap);
        va_end(ap);
        if (n >= (int)sizeof text) {
            trim_utf8(text);
        }
        memcpy(err->text, text, sizeof text);
        err->status = status;
    }
    return status;
}

lk_status_t lk_error_prefix(lk_error_t *err, const char *fmt, ...)
{
    if (err == NULL) {
        return LK_ERR_INTERNAL;
    }
    char prefix[256];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(prefix, sizeof prefix, fmt, ap);
    va_end(ap);
    char old[LK_ERROR_TEXT_MAX];
    memcpy(old, err->text, sizeof old);
    return lk_error_set(err, err->status, "%s: %s", prefix, old);
}

noreturn void lk_check_failed(const char *file, int line, const char *what, const char *fmt, ...)
{
    fprintf(stderr, "lockstep: CHECK failed at %s:%d: %s ", file, line, what);
    va_list ap;
    va_start(ap, fmt);
    vfprintf(stderr, fmt, ap);
    va_end(ap);
    fputc('\n', stderr);
    fflush(stderr);
    abort();
}
