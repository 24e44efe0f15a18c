/*
 * reply_cache.h: a call repeated with the same Idempotency-Key gets the first one's answer again;
 * while that is still being worked on it joins and waits. Bounded; the oldest finished answers are
 * forgotten first.
 */
#ifndef LK_API_FRONTEND_REPLY_CACHE_H
#define LK_API_FRONTEND_REPLY_CACHE_H

#include "api_frontend/api_call.h"

typedef struct reply_cache reply_cache_t;
typedef struct reply_cache_entry reply_cache_entry_t;

#define REPLY_CACHE_MAX_BODY (1u << 20) /* bytes; a longer answer is not kept */

reply_cache_t *reply_cache_new(size_t max_entries);
/* Calls that still wait are not answered. */
void reply_cache_destroy(reply_cache_t **self_p);

typedef enum {
    REPLY_CACHE_RUN,   /* the first: carry it out; its reply is kept */
    REPLY_CACHE_TAKEN, /* answered, or joined: the caller must not touch the call any more */
    REPLY_CACHE_OTHER, /* the key was used with other content */
    REPLY_CACHE_FULL,  /* too many calls in flight */
} reply_cache_verdict_t;

/* name and content (a digest of the arguments) belong to the key. */
reply_cache_verdict_t reply_cache_enter(reply_cache_t *self, api_call_t *call, const char *name,
                                        uint64_t content);
/* By api_call_reply, for an entry that enter put into call->cached. */
void reply_cache_finish(reply_cache_entry_t *entry, int http_status, const char *body, size_t len);

#endif
