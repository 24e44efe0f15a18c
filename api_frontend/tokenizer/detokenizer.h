/*
 * detokenizer.h: the text of one stream of token ids, in pieces that can be sent as they come.
 *
 * The pieces concatenate to exactly what tokenizer_decode gives for all ids, cut at a stop string
 * if one is found. No piece splits a UTF-8 character: bytes that may be the beginning of one are
 * held back, and so is text that may be the beginning of a stop string. A pure object: one thread,
 * no I/O; the tokenizer is borrowed and must outlive it.
 */
#ifndef LK_TOKENIZER_DETOKENIZER_H
#define LK_TOKENIZER_DETOKENIZER_H

#include "api_frontend/tokenizer/tokenizer.h"

typedef struct detokenizer detokenizer_t;

typedef struct {
    bool skip_special;        /* special tokens give no text */
    bool include_stop;        /* a stop string that is found stays in the text */
    uint32_t min_tokens;      /* a stop string that ends within the first ones doesn't count */
    const char *const *stops; /* copied */
    size_t n_stops;
} detokenizer_options_t;

/* ERR_INVALID names the bad "stop[i]". */
LK_MUST_USE lk_status_t detokenizer_new(const tokenizer_t *tokenizer,
                                        const detokenizer_options_t *options, detokenizer_t **out,
                                        lk_error_t *err);
void detokenizer_destroy(detokenizer_t **detokenizer);

/*
 * Takes ids and appends to out the text that is now certain. When a stop string is found, the text
 * ends there, *n_used (may be NULL) is the number of ids up to and with the one that completed it
 * (else n), and ids after it are ignored, as are later calls. A stream that ends at a stop token
 * id whose text isn't wanted simply doesn't pass that id.
 * ERR_NO_MEMORY, ERR_TOO_LARGE (out's limit).
 */
LK_MUST_USE lk_status_t detokenizer_push(detokenizer_t *d, const uint32_t *ids, size_t n,
                                         lk_buf_t *out, size_t *n_used, lk_error_t *err);

/* Ends the stream: appends what was held back, with U+FFFD for an unfinished character (which may
 * complete no stop string). Later pushes are ignored. */
LK_MUST_USE lk_status_t detokenizer_finish(detokenizer_t *d, lk_buf_t *out, lk_error_t *err);

/* Index of the stop string that ended the text, or -1. */
int detokenizer_stop(const detokenizer_t *d);

#endif
