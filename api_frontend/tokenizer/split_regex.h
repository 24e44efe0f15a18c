/*
 * split_regex.h: the regular expressions of pre-tokenizers. Files are written for Oniguruma's Ruby
 * syntax with Unicode; PCRE2 runs them. What the two read differently is either rewritten (white
 * space and word classes) or refused by name, never silently matched in another way.
 *
 * Read-only after creation. Matching is bounded by a limit on PCRE2's steps.
 */
#ifndef LK_TOKENIZER_SPLIT_REGEX_H
#define LK_TOKENIZER_SPLIT_REGEX_H

#include "base/status.h"

#define SPLIT_REGEX_MAX_PATTERN 16384u

typedef struct split_regex split_regex_t;

/* literal: the pattern is a plain string. pattern is valid UTF-8. ERR_UNSUPPORTED: a construct
 * with another meaning in PCRE2; ERR_INVALID: not a pattern. */
lk_status_t split_regex_new(const char *pattern, bool literal, split_regex_t **out,
                            lk_error_t *err);
void split_regex_destroy(split_regex_t **regex);

/* State of a search over many texts; not shared by threads. */
typedef struct split_search split_search_t;
split_search_t *split_search_new(void);
void split_search_destroy(split_search_t **search);

/*
 * Finds the next match in text (valid UTF-8) as Oniguruma's find_iter does: from *from on, and an
 * empty match directly after the last match is skipped. Start with *from = 0, *last_end =
 * SIZE_MAX. LK_OK: [*start, *end) is a match, and *from and *last_end are ready for the next call.
 * ERR_NOT_FOUND: none is left (err is untouched). Others: the step limit, memory.
 */
lk_status_t split_search_next(split_search_t *search, const split_regex_t *regex, const char *text,
                              size_t len, size_t *from, size_t *last_end, size_t *start,
                              size_t *end, lk_error_t *err);

#endif
