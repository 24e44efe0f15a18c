/*
 * normalizer.h: Unicode normalisation forms (UAX #15), with utf8proc's tables. Linear in the text,
 * whatever it holds: runs of combining marks are sorted by counting, not by exchanging.
 */
#ifndef LK_TOKENIZER_NORMALIZER_H
#define LK_TOKENIZER_NORMALIZER_H

#include "base/buf.h"

/* name in tokenizer.json, enum */
#define NORMALIZER_TABLE(X)                                                                        \
    X("NFC", NFC, true, false)                                                                     \
    X("NFD", NFD, false, false)                                                                    \
    X("NFKC", NFKC, true, true)                                                                    \
    X("NFKD", NFKD, false, true)

typedef enum {
#define X(name, value, compose, compat) NORMALIZER_##value,
    NORMALIZER_TABLE(X)
#undef X
        NORMALIZER_N
} normalizer_form_t;

/* Returns the form's index by its name, NORMALIZER_N if there is none. */
normalizer_form_t normalizer_by_name(const char *name);

/* Appends the normalised text to out. text is valid UTF-8. Sets out->failed when out of memory. */
void normalizer_apply(normalizer_form_t form, const char *text, size_t len, lk_buf_t *out);

#endif
