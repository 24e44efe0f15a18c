#include "api_frontend/reply_cache.h"
#include "base/check.h"
#include "base/hash.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_JOINED 64 /* calls waiting for one answer */

struct reply_cache_entry {
    reply_cache_t *cache;
    reply_cache_entry_t *prev, *next; /* newest last */
    reply_cache_entry_t *chain;       /* of its bucket */
    char key[256];
    uint64_t hash; /* of the key */
    uint64_t content;
    bool finished;
    int status;
    char *body;
    size_t len;
    size_t n_joined;
    api_call_t *joined[MAX_JOINED];
};

struct reply_cache {
    size_t max_entries, n;
    reply_cache_entry_t *first, *last;
    size_t n_buckets; /* a power of two */
    reply_cache_entry_t *buckets[];
};

static reply_cache_entry_t **bucket_of(reply_cache_t *self, uint64_t hash)
{
    return &self->buckets[hash & (self->n_buckets - 1)];
}

reply_cache_t *reply_cache_new(size_t max_entries)
{
    size_t n_buckets = 1;
    while (n_buckets < max_entries) {
        n_buckets *= 2;
    }
    reply_cache_t *self = calloc(1, sizeof *self + n_buckets * sizeof self->buckets[0]);
    if (self != NULL) {
        self->max_entries = max_entries;
        self->n_buckets = n_buckets;
    }
    return self;
}

static void unlink_entry(reply_cache_t *self, reply_cache_entry_t *e)
{
    *(e->prev != NULL ? &e->prev->next : &self->first) = e->next;
    *(e->next != NULL ? &e->next->prev : &self->last) = e->prev;
    reply_cache_entry_t **p = bucket_of(self, e->hash);
    while (*p != e) {
        p = &(*p)->chain;
    }
    *p = e->chain;
    self->n--;
}

static void drop(reply_cache_t *self, reply_cache_entry_t *e)
{
    unlink_entry(self, e);
    free(e->body);
    free(e);
}

void reply_cache_destroy(reply_cache_t **self_p)
{
    if (self_p == NULL || *self_p == NULL) {
        return;
    }
    while ((*self_p)->first != NULL) {
        drop(*self_p, (*self_p)->first);
    }
    free(*self_p);
    *self_p = NULL;
}

/* Makes room; false when every entry is in flight. */
static bool make_room(reply_cache_t *self)
{
    for (reply_cache_entry_t *e = self->first; e != NULL && self->n >= self->max_entries;) {
        reply_cache_entry_t *next = e->next;
        if (e->finished) {
            drop(self, e);
        }
        e = next;
    }
    return self->n < self->max_entries;
}

static reply_cache_verdict_t repeat(reply_cache_entry_t *e, api_call_t *call, uint64_t content)
{
    if (e->content != content) {
        return REPLY_CACHE_OTHER;
    }
    if (e->finished) {
        api_call_reply(call, e->status, e->body, e->len);
        return REPLY_CACHE_TAKEN;
    }
    if (e->n_joined == MAX_JOINED) {
        return REPLY_CACHE_FULL;
    }
    e->joined[e->n_joined++] = call;
    return REPLY_CACHE_TAKEN;
}

reply_cache_verdict_t reply_cache_enter(reply_cache_t *self, api_call_t *call, const char *name,
                                        uint64_t content)
{
    char key[sizeof self->first->key];
    snprintf(key, sizeof key, "%s %s", name, call->idempotency_key);
    uint64_t hash = lk_hash64(key, strlen(key), 0);
    for (reply_cache_entry_t *e = *bucket_of(self, hash); e != NULL; e = e->chain) {
        if (e->hash == hash && strcmp(e->key, key) == 0) {
            return repeat(e, call, content);
        }
    }
    reply_cache_entry_t *e = make_room(self) ? calloc(1, sizeof *e) : NULL;
    if (e == NULL) {
        return REPLY_CACHE_FULL;
    }
    e->cache = self;
    e->content = content;
    memcpy(e->key, key, sizeof key);
    e->hash = hash;
    e->chain = *bucket_of(self, hash);
    *bucket_of(self, hash) = e;
    e->prev = self->last;
    *(self->last != NULL ? &self->last->next : &self->first) = e;
    self->last = e;
    self->n++;
    call->cached = e;
    return REPLY_CACHE_RUN;
}

void reply_cache_finish(reply_cache_entry_t *entry, int http_status, const char *body, size_t len)
{
    for (size_t i = 0; i < entry->n_joined; i++) {
        api_call_reply(entry->joined[i], http_status, body, len);
    }
    entry->n_joined = 0;
    entry->body = len <= REPLY_CACHE_MAX_BODY ? malloc(len + 1) : NULL;
    if (entry->body == NULL) {
        drop(entry->cache, entry);
        return;
    }
    memcpy(entry->body, body, len);
    entry->body[len] = '\0';
    entry->len = len;
    entry->status = http_status;
    entry->finished = true;
}
