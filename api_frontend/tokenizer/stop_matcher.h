/*
 * stop_matcher.h: finds stop strings in a text that arrives byte by byte (Knuth-Morris-Pratt, one
 * state per string): constant work per byte and string, whatever the pieces are. Of several the
 * one that ends first counts, of those that end together the longest.
 */
#ifndef LK_TOKENIZER_STOP_MATCHER_H
#define LK_TOKENIZER_STOP_MATCHER_H

#include "base/status.h"

#define STOP_MATCHER_MAX_STRINGS 256
#define STOP_MATCHER_MAX_BYTES   65536u /* all strings together */

typedef struct stop_matcher stop_matcher_t;

/* Copies the strings (valid UTF-8, none empty; n may be 0). ERR_INVALID names "stop[i]". */
lk_status_t stop_matcher_new(const char *const *strings, size_t n, stop_matcher_t **out,
                             lk_error_t *err);
void stop_matcher_destroy(stop_matcher_t **matcher);

/* Takes the next byte; returns the index of a string that ends with it, or -1. */
int stop_matcher_step(stop_matcher_t *matcher, uint8_t byte);

/* Bytes at the end of the text so far that may be the beginning of a stop string. */
size_t stop_matcher_held(const stop_matcher_t *matcher);

size_t stop_matcher_length(const stop_matcher_t *matcher, int index);

#endif
