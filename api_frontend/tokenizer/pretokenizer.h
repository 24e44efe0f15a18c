/*
 * pretokenizer.h: cuts a text into the words that merging works on. A list of steps (split by a
 * pattern, by digits), ended by the byte-level step, which may add a space in front of a piece and
 * split with GPT-2's pattern. Read-only once built.
 */
#ifndef LK_TOKENIZER_PRETOKENIZER_H
#define LK_TOKENIZER_PRETOKENIZER_H

#include "api_frontend/tokenizer/split_regex.h"

#define PRETOKENIZER_MAX_STEPS 32

/* name in tokenizer.json, enum: what becomes of the matches of a split */
#define PRETOKENIZER_BEHAVIOR_TABLE(X)                                                             \
    X("Isolated", ISOLATED)                                                                        \
    X("Removed", REMOVED)                                                                          \
    X("MergedWithPrevious", MERGED_WITH_PREVIOUS)                                                  \
    X("MergedWithNext", MERGED_WITH_NEXT)                                                          \
    X("Contiguous", CONTIGUOUS)

typedef enum {
#define X(name, value) PRETOKENIZER_##value,
    PRETOKENIZER_BEHAVIOR_TABLE(X)
#undef X
        PRETOKENIZER_BEHAVIOR_N
} pretokenizer_behavior_t;

pretokenizer_behavior_t pretokenizer_behavior_by_name(const char *name);

typedef struct {
    split_regex_t *regex; /* owned */
    pretokenizer_behavior_t behavior;
    bool invert; /* the text between matches counts as the matches */
} pretokenizer_step_t;

typedef struct {
    pretokenizer_step_t steps[PRETOKENIZER_MAX_STEPS];
    uint32_t n_steps;
    bool add_prefix_space;  /* the byte-level step puts one before pieces that begin without */
    uint32_t prefix_before; /* index of the step before which it does */
    bool is_complete;       /* has its byte-level step */
} pretokenizer_t;

/* Takes ownership of step->regex. ERR_INVALID: too many steps (the regex is freed). */
lk_status_t pretokenizer_add(pretokenizer_t *p, const pretokenizer_step_t *step, lk_error_t *err);
/* The byte-level step, which must be the last: the space, then GPT-2's pattern if asked for. */
lk_status_t pretokenizer_add_byte_level(pretokenizer_t *p, bool add_prefix_space, bool use_regex,
                                        lk_error_t *err);
void pretokenizer_fini(pretokenizer_t *p);

/* Called for each word, in order; words are never empty. Anything but LK_OK ends the walk. */
typedef lk_status_t (*pretokenizer_word_fn)(void *ctx, const char *word, size_t len,
                                            lk_error_t *err);

/* Cuts text (valid UTF-8, below 2^31 bytes). search is scratch of the calling thread. */
lk_status_t pretokenizer_run(const pretokenizer_t *p, split_search_t *search, const char *text,
                             size_t len, pretokenizer_word_fn word, void *ctx, lk_error_t *err);

#endif
