#include "api_frontend/tokenizer/normalizer.h"
#include "api_frontend/tokenizer/utf8.h"
#include "base/check.h"

#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

/* Code points below these are unchanged by the form, whatever follows them below the bound. */
#define FIRST_COMBINING 0x300u
#define FIRST_NON_ASCII 0x80u

static const struct {
    const char *name;
    bool compose, compat;
} forms[] = {
#define X(name, value, compose, compat) {name, compose, compat},
    NORMALIZER_TABLE(X)
#undef X
};

normalizer_form_t normalizer_by_name(const char *name)
{
    size_t i = 0;
    while (i < LK_ARRAY_LEN(forms) && strcmp(forms[i].name, name) != 0) {
        i++;
    }
    return (normalizer_form_t)i;
}

/* A growing array of code points. */
typedef struct {
    utf8proc_int32_t *c;
    size_t n, cap;
} points_t;

static bool is_unchanged(normalizer_form_t form, const char *text, size_t len)
{
    uint32_t bound = form == NORMALIZER_NFC ? FIRST_COMBINING : FIRST_NON_ASCII;
    uint8_t lead = bound == FIRST_COMBINING ? 0xCC : 0x80; /* first byte of U+0300 in UTF-8 */
    for (size_t i = 0; i < len; i++) {
        uint8_t b = (uint8_t)text[i];
        if (b >= lead && (lead == 0x80 || b >= 0xC0)) {
            return false;
        }
    }
    return true;
}

static bool decompose_char(points_t *out, utf8proc_int32_t c, utf8proc_option_t options)
{
    int last_boundclass = 0;
    for (;;) {
        utf8proc_ssize_t room = (utf8proc_ssize_t)(out->cap - out->n);
        utf8proc_ssize_t n =
            utf8proc_decompose_char(c, out->c + out->n, room, options, &last_boundclass);
        CHECK(n >= 0);
        if (n <= room) {
            out->n += (size_t)n;
            return true;
        }
        size_t cap = out->cap * 2 + (size_t)n;
        utf8proc_int32_t *p = realloc(out->c, cap * sizeof *p);
        if (p == NULL) {
            return false;
        }
        out->c = p;
        out->cap = cap;
    }
}

/* Sorts a run of combining marks by class, stably, in two passes. */
static bool sort_run(utf8proc_int32_t *run, size_t n)
{
    size_t at[257] = {0};
    for (size_t i = 0; i < n; i++) {
        at[utf8proc_get_property(run[i])->combining_class + 1]++;
    }
    for (size_t k = 1; k < 257; k++) {
        at[k] += at[k - 1];
    }
    utf8proc_int32_t *sorted = malloc(n * sizeof *sorted);
    if (sorted == NULL) {
        return false;
    }
    for (size_t i = 0; i < n; i++) {
        sorted[at[utf8proc_get_property(run[i])->combining_class]++] = run[i];
    }
    memcpy(run, sorted, n * sizeof *run);
    free(sorted);
    return true;
}

/* Canonical ordering: each run of characters with a class other than 0 gets sorted. */
static bool reorder(points_t *p)
{
    for (size_t i = 0; i < p->n;) {
        size_t start = i;
        bool sorted = true;
        int previous = 0;
        for (; i < p->n; i++) {
            int ccc = utf8proc_get_property(p->c[i])->combining_class;
            if (ccc == 0) {
                break;
            }
            sorted = sorted && previous <= ccc;
            previous = ccc;
        }
        if (!sorted && !sort_run(p->c + start, i - start)) {
            return false;
        }
        i += i == start ? 1 : 0;
    }
    return true;
}

void normalizer_apply(normalizer_form_t form, const char *text, size_t len, lk_buf_t *out)
{
    if (is_unchanged(form, text, len)) {
        lk_buf_append(out, text, len);
        return;
    }
    utf8proc_option_t options =
        UTF8PROC_STABLE | UTF8PROC_DECOMPOSE | (forms[form].compat ? UTF8PROC_COMPAT : 0);
    points_t p = {.cap = len + 16};
    p.c = malloc(p.cap * sizeof *p.c);
    if (p.c == NULL) {
        goto err_no_memory;
    }
    const uint8_t *bytes = (const uint8_t *)text;
    for (size_t i = 0; i < len;) {
        size_t n;
        CHECK(utf8_look(bytes + i, len - i, &n) == UTF8_VALID);
        utf8proc_int32_t c = (utf8proc_int32_t)utf8_decode(bytes + i, n);
        if (!decompose_char(&p, c, options)) {
            goto err_no_memory;
        }
        i += n;
    }
    if (!reorder(&p)) {
        goto err_no_memory;
    }
    if (forms[form].compose) {
        utf8proc_ssize_t n = utf8proc_normalize_utf32(p.c, (utf8proc_ssize_t)p.n,
                                                      UTF8PROC_STABLE | UTF8PROC_COMPOSE);
        CHECK(n >= 0);
        p.n = (size_t)n;
    }
    for (size_t i = 0; i < p.n; i++) {
        utf8proc_uint8_t utf8[4];
        utf8proc_ssize_t n = utf8proc_encode_char(p.c[i], utf8);
        lk_buf_append(out, utf8, (size_t)n);
    }
    free(p.c);
    return;
err_no_memory:
    free(p.c);
    out->failed = true;
}
