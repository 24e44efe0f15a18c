#define PCRE2_CODE_UNIT_WIDTH 8
#include "api_frontend/tokenizer/split_regex.h"
#include "api_frontend/tokenizer/utf8.h"
#include "base/check.h"

#include <pcre2.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Steps one match may take: enough to walk back over the longest text once. */
#define MATCH_LIMIT (40u << 20)
/* KiB of heap that PCRE2's interpreter may take where the JIT is not available. */
#define HEAP_LIMIT_KIB (256u << 10)
#define JIT_STACK_MIN  (32u << 10)
#define JIT_STACK_MAX  (8u << 20)

struct split_regex {
    pcre2_code *code;
};

struct split_search {
    pcre2_match_data *data;
    pcre2_match_context *context;
    pcre2_jit_stack *stack;
};

/* Members of the classes that the two engines define differently, without brackets. */
#define SPACE_MEMBERS                                                                              \
    "\\t-\\r \\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}"       \
    "\\x{3000}"
#define WORD_MEMBERS                                                                               \
    "\\p{L}\\p{M}\\p{Nd}\\p{Nl}\\p{Pc}\\x{24b6}-\\x{24e9}\\x{1f130}-\\x{1f149}\\x{1f150}-\\x{"     \
    "1f169}"                                                                                       \
    "\\x{1f170}-\\x{1f189}"

/* Escapes that Ruby and PCRE2 read differently, or that only one of them has. */
#define REFUSED_ESCAPES "CEGHKNQRUVXYhvyg"

static lk_status_t differs(lk_error_t *err, size_t at, const char *what)
{
    return lk_error_set(err, LK_ERR_UNSUPPORTED, "at byte %zu: %s is not supported", at, what);
}

/* One escape at p[0] == '\\'. Writes its translation; *n is the bytes it takes. */
static lk_status_t translate_escape(const char *p, size_t at, bool in_class, lk_buf_t *out,
                                    size_t *n, lk_error_t *err)
{
    char c = p[1];
    *n = 2;
    if (c == '\0') {
        return lk_error_set(err, LK_ERR_INVALID, "at byte %zu: a backslash ends the pattern", at);
    }
    if (strchr(REFUSED_ESCAPES, c) != NULL) {
        char what[16];
        snprintf(what, sizeof what, "\\%c", c);
        return differs(err, at, what);
    }
    bool space = c == 's' || c == 'S', word = c == 'w' || c == 'W';
    if (!space && !word) {
        if (strchr("pPx", c) != NULL && p[2] == '{') { /* its braces are no interval */
            const char *end = strchr(p, '}');
            *n = end == NULL ? 2 : (size_t)(end - p) + 1;
        }
        lk_buf_append(out, p, *n);
        return LK_OK;
    }
    const char *members = space ? SPACE_MEMBERS : WORD_MEMBERS;
    bool negated = c == 'S' || c == 'W';
    if (in_class && negated) {
        /* no way to write the complement of several members inside a class: PCRE2's own \S and \W
         * differ from it in U+180E, and in marks */
        if (word) {
            return differs(err, at, "\\W inside a character class");
        }
        lk_buf_append(out, p, 2);
    } else if (in_class) {
        lk_buf_str(out, members);
    } else {
        lk_buf_printf(out, "[%s%s]", negated ? "^" : "", members);
    }
    return LK_OK;
}

static lk_status_t translate(const char *p, lk_buf_t *out, lk_error_t *err)
{
    bool in_class = false;
    for (size_t i = 0; p[i] != '\0';) {
        size_t n = 1;
        if (p[i] == '\\') {
            LK_RETURN_IF_ERROR(translate_escape(p + i, i, in_class, out, &n, err));
            i += n;
            continue;
        }
        if (in_class && p[i] == '[' && p[i + 1] == ':') {
            const char *end = strstr(p + i, ":]");
            if (end == NULL) {
                return lk_error_set(err, LK_ERR_INVALID, "at byte %zu: [: without :]", i);
            }
            n = (size_t)(end - (p + i)) + 2;
        } else if (in_class && p[i] == '[') {
            return differs(err, i, "a character class inside another");
        } else if (in_class && p[i] == '&' && p[i + 1] == '&') {
            return differs(err, i, "an intersection (&&) of character classes");
        } else if (in_class && p[i] == ']') {
            in_class = false;
        } else if (!in_class && p[i] == '[') {
            in_class = true;
            n += p[i + 1] == '^' ? 1 : 0;
            n += p[i + n] == ']' ? 1 : 0;
        } else if (!in_class && p[i] == '}' && p[i + 1] == '+') {
            return differs(err, i, "a + after an interval");
        } else if (!in_class && p[i] == '(' && p[i + 1] == '*') {
            return differs(err, i, "a verb (*...)");
        } else if (!in_class && p[i] == '(' && p[i + 1] == '?' && p[i + 2] != '\0' &&
                   strchr("CRPm&|0123456789+('", p[i + 2]) != NULL) {
            return differs(err, i, "this kind of group");
        }
        lk_buf_append(out, p + i, n);
        i += n;
    }
    return LK_OK;
}

lk_status_t split_regex_new(const char *pattern, bool literal, split_regex_t **out, lk_error_t *err)
{
    size_t len = strlen(pattern);
    if (len == 0 || len > SPLIT_REGEX_MAX_PATTERN) {
        return lk_error_set(err, LK_ERR_INVALID, "pattern has %zu bytes, allowed are 1 to %u", len,
                            SPLIT_REGEX_MAX_PATTERN);
    }
    lk_buf_t text;
    lk_buf_init(&text, 0);
    lk_status_t status = LK_OK;
    pcre2_compile_context *context = pcre2_compile_context_create(NULL);
    split_regex_t *regex = calloc(1, sizeof *regex);
    if (literal) {
        lk_buf_append(&text, pattern, len);
    } else {
        status = translate(pattern, &text, err);
        if (status != LK_OK) {
            goto out_free;
        }
    }
    if (context == NULL || regex == NULL || text.failed) {
        status = lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory for the pattern");
        goto out_free;
    }
    pcre2_set_newline(context, PCRE2_NEWLINE_LF);
    /* Ruby's ^ and $ are those of lines */
    uint32_t options = literal ? PCRE2_LITERAL | PCRE2_UTF
                               : PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C;
    int code;
    PCRE2_SIZE at;
    regex->code = pcre2_compile((PCRE2_SPTR)text.data, text.len, options, &code, &at, context);
    if (regex->code == NULL) {
        char why[160];
        pcre2_get_error_message(code, (PCRE2_UCHAR *)why, sizeof why);
        status = lk_error_set(err, LK_ERR_INVALID, "not a regular expression: %s", why);
        goto out_free;
    }
    /* a refusal leaves the interpreter, which gives the same matches more slowly */
    (void)pcre2_jit_compile(regex->code, PCRE2_JIT_COMPLETE);
    *out = regex;
    regex = NULL;
out_free:
    free(regex);
    pcre2_compile_context_free(context);
    lk_buf_fini(&text);
    return status;
}

void split_regex_destroy(split_regex_t **regex)
{
    if (*regex != NULL) {
        pcre2_code_free((*regex)->code);
        free(*regex);
        *regex = NULL;
    }
}

split_search_t *split_search_new(void)
{
    split_search_t *search = calloc(1, sizeof *search);
    if (search == NULL) {
        return NULL;
    }
    search->data = pcre2_match_data_create(1, NULL);
    search->context = pcre2_match_context_create(NULL);
    if (search->data == NULL || search->context == NULL) {
        split_search_destroy(&search);
        return NULL;
    }
    pcre2_set_match_limit(search->context, MATCH_LIMIT);
    pcre2_set_heap_limit(search->context, HEAP_LIMIT_KIB);
    return search;
}

void split_search_destroy(split_search_t **search)
{
    if (*search != NULL) {
        pcre2_jit_stack_free((*search)->stack);
        pcre2_match_context_free((*search)->context);
        pcre2_match_data_free((*search)->data);
        free(*search);
        *search = NULL;
    }
}

/* Compiled patterns run on 32 KiB of the thread's own stack until one needs more: most never do,
 * and a stack of its own costs more than matching a short text. */
static int match(split_search_t *search, const split_regex_t *regex, const char *text, size_t len,
                 size_t from)
{
    /* the text is known to be UTF-8: a check per match would make a pass quadratic */
    int rc = pcre2_match(regex->code, (PCRE2_SPTR)text, len, from, PCRE2_NO_UTF_CHECK, search->data,
                         search->context);
    if (rc == PCRE2_ERROR_JIT_STACKLIMIT && search->stack == NULL) {
        search->stack = pcre2_jit_stack_create(JIT_STACK_MIN, JIT_STACK_MAX, NULL);
        if (search->stack == NULL) {
            return PCRE2_ERROR_NOMEMORY;
        }
        pcre2_jit_stack_assign(search->context, NULL, search->stack);
        rc = pcre2_match(regex->code, (PCRE2_SPTR)text, len, from, PCRE2_NO_UTF_CHECK, search->data,
                         search->context);
    }
    return rc;
}

lk_status_t split_search_next(split_search_t *search, const split_regex_t *regex, const char *text,
                              size_t len, size_t *from, size_t *last_end, size_t *start,
                              size_t *end, lk_error_t *err)
{
    while (*from <= len) {
        int rc = match(search, regex, text, len, *from);
        if (rc == PCRE2_ERROR_NOMATCH) {
            return LK_ERR_NOT_FOUND;
        }
        if (rc < 0) {
            char why[160];
            pcre2_get_error_message(rc, (PCRE2_UCHAR *)why, sizeof why);
            return lk_error_set(err, rc == PCRE2_ERROR_NOMEMORY ? LK_ERR_NO_MEMORY : LK_ERR_INVALID,
                                "splitting the text with the tokenizer's pattern failed at byte "
                                "%zu: %s",
                                *from, why);
        }
        const PCRE2_SIZE *v = pcre2_get_ovector_pointer(search->data);
        size_t s = v[0], e = v[1];
        if (s < e || e != *last_end) {
            if (s > e) { /* a look-behind with \K-like effect; \K itself is refused */
                return lk_error_set(err, LK_ERR_INVALID,
                                    "the tokenizer's pattern matches "
                                    "backwards");
            }
            *start = s;
            *end = e;
            *from = *last_end = e;
            return LK_OK;
        }
        size_t n = 1;
        if (*from < len) {
            utf8_look((const uint8_t *)text + *from, len - *from, &n);
        }
        *from += n;
    }
    return LK_ERR_NOT_FOUND;
}
