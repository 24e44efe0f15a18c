/*
 * span_list.h: which weights made which output tokens, or the KV of which positions: half-open
 * spans in order, each with a version label and an epoch. Pure.
 */
#ifndef LK_API_FRONTEND_SPAN_LIST_H
#define LK_API_FRONTEND_SPAN_LIST_H

#include "base/buf.h"
#include "proto/messages.h"

typedef struct {
    char *version;
    uint64_t epoch, start, end;
} span_t;

typedef struct {
    span_t *items;
    size_t n, cap;
} span_list_t;

/* {0} is an empty list. Accepts NULL. */
void span_list_fini(span_list_t *self);
void span_list_clear(span_list_t *self);
/* [start, end) follows what is there; the last span grows when version and epoch are its own. */
void span_list_append(span_list_t *self, const char *version, uint64_t epoch, uint64_t start,
                      uint64_t end);
/* True when the list, or a and b together, hold more than one epoch. */
bool span_lists_mix(const span_list_t *a, const span_list_t *b);
/* [{"version":"v","epoch":1,"start":0,"end":5}] */
void span_list_json(const span_list_t *self, lk_buf_t *out);

#endif
