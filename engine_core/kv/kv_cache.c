#include "engine_core/kv/kv_cache.h"
#include "base/prng.h"

#include <stdlib.h>
#include <string.h>

#define NIL UINT32_MAX

/*
 * A block is held (ref > 0) or in the free list (ref == 0); and it is cached (serial > 0, in the
 * hash table) or not. The free list is in the order of eviction: blocks without contents in front.
 */
typedef struct {
    uint32_t ref;
    uint32_t prev, next; /* free list, when ref == 0 */
    uint32_t hash_next;  /* bucket chain, when cached */
    uint64_t hash;
    uint64_t serial; /* of this entry, never used again; 0: not cached */
    uint64_t parent; /* serial of the block before it; 0: first block */
    uint64_t epoch;
    lk_hash128_t salt;
} block_t;

struct kv_cache {
    uint32_t num_blocks, block_size;
    bool caching;
    block_t *blocks;
    uint32_t *tokens; /* [num_blocks, block_size]: contents of cached blocks */
    uint32_t *buckets;
    uint32_t bucket_mask;
    uint32_t free_head, free_tail, n_free;
    uint64_t next_serial;
    kv_cache_stats_t stats;
};

/* What a block's key is made of; tokens has block_size entries. */
typedef struct {
    uint64_t parent, epoch;
    lk_hash128_t salt;
    const uint32_t *tokens;
    uint64_t hash;
} block_key_t;

static void free_list_push_tail(kv_cache_t *self, uint32_t b)
{
    self->blocks[b].prev = self->free_tail;
    self->blocks[b].next = NIL;
    if (self->free_tail != NIL) {
        self->blocks[self->free_tail].next = b;
    } else {
        self->free_head = b;
    }
    self->free_tail = b;
    self->n_free++;
}

static void free_list_push_head(kv_cache_t *self, uint32_t b)
{
    self->blocks[b].prev = NIL;
    self->blocks[b].next = self->free_head;
    if (self->free_head != NIL) {
        self->blocks[self->free_head].prev = b;
    } else {
        self->free_tail = b;
    }
    self->free_head = b;
    self->n_free++;
}

static void free_list_remove(kv_cache_t *self, uint32_t b)
{
    block_t *blk = &self->blocks[b];
    if (blk->prev != NIL) {
        self->blocks[blk->prev].next = blk->next;
    } else {
        self->free_head = blk->next;
    }
    if (blk->next != NIL) {
        self->blocks[blk->next].prev = blk->prev;
    } else {
        self->free_tail = blk->prev;
    }
    self->n_free--;
}

static block_key_t make_key(const kv_cache_t *self, const request_t *r, uint32_t i, uint64_t parent,
                            uint64_t epoch)
{
    const uint32_t *tokens = r->tokens + (size_t)i * self->block_size;
    uint64_t seed = lk_mix64(parent) ^ lk_mix64(epoch + 1) ^ lk_mix64(r->salt.lo ^ r->salt.hi);
    return (block_key_t){
        .parent = parent,
        .epoch = epoch,
        .salt = r->salt,
        .tokens = tokens,
        .hash = lk_hash64(tokens, self->block_size * sizeof *tokens, seed),
    };
}

static bool key_equal(const kv_cache_t *self, uint32_t b, const block_key_t *key)
{
    const block_t *blk = &self->blocks[b];
    return blk->hash == key->hash && blk->parent == key->parent && blk->epoch == key->epoch &&
           lk_hash128_equal(blk->salt, key->salt) &&
           memcmp(self->tokens + (size_t)b * self->block_size, key->tokens,
                  self->block_size * sizeof *key->tokens) == 0;
}

static uint32_t table_find(const kv_cache_t *self, const block_key_t *key)
{
    uint32_t b = self->buckets[key->hash & self->bucket_mask];
    while (b != NIL && !key_equal(self, b, key)) {
        b = self->blocks[b].hash_next;
    }
    return b;
}

static void table_insert(kv_cache_t *self, uint32_t b, const block_key_t *key)
{
    block_t *blk = &self->blocks[b];
    uint32_t *bucket = &self->buckets[key->hash & self->bucket_mask];
    blk->hash = key->hash;
    blk->serial = ++self->next_serial;
    blk->parent = key->parent;
    blk->epoch = key->epoch;
    blk->salt = key->salt;
    memcpy(self->tokens + (size_t)b * self->block_size, key->tokens,
           self->block_size * sizeof *key->tokens);
    blk->hash_next = *bucket;
    *bucket = b;
}

static void table_remove(kv_cache_t *self, uint32_t b)
{
    block_t *blk = &self->blocks[b];
    uint32_t *link = &self->buckets[blk->hash & self->bucket_mask];
    while (*link != b) {
        CHECK(*link != NIL);
        link = &self->blocks[*link].hash_next;
    }
    *link = blk->hash_next;
    blk->serial = 0;
}

kv_cache_t *kv_cache_new(uint32_t num_blocks, uint32_t block_size, bool enable_prefix_caching)
{
    CHECK(num_blocks > 0 && num_blocks < NIL && block_size > 0);
    kv_cache_t *self = calloc(1, sizeof *self);
    if (self == NULL) {
        return NULL;
    }
    uint32_t n_buckets = 1;
    while (n_buckets < num_blocks && n_buckets < 1u << 30) {
        n_buckets *= 2;
    }
    self->num_blocks = num_blocks;
    self->block_size = block_size;
    self->caching = enable_prefix_caching;
    self->bucket_mask = n_buckets - 1;
    self->blocks = calloc(num_blocks, sizeof *self->blocks);
    self->buckets = malloc(n_buckets * sizeof *self->buckets);
    self->tokens = enable_prefix_caching
                       ? calloc(num_blocks, (size_t)block_size * sizeof *self->tokens)
                       : NULL;
    if (self->blocks == NULL || self->buckets == NULL ||
        (enable_prefix_caching && self->tokens == NULL)) {
        kv_cache_destroy(&self);
        return NULL;
    }
    memset(self->buckets, 0xff, n_buckets * sizeof *self->buckets); /* NIL */
    self->free_head = self->free_tail = NIL;
    for (uint32_t b = 0; b < num_blocks; b++) {
        free_list_push_tail(self, b);
    }
    return self;
}

void kv_cache_destroy(kv_cache_t **self_p)
{
    kv_cache_t *self = *self_p;
    if (self == NULL) {
        return;
    }
    free(self->blocks);
    free(self->tokens);
    free(self->buckets);
    free(self);
    *self_p = NULL;
}

static uint32_t blocks_for(const kv_cache_t *self, uint32_t n_positions)
{
    return (uint32_t)(((uint64_t)n_positions + self->block_size - 1) / self->block_size);
}

/* Walks the cached prefix of r; returns its blocks' number, and how many of them are in the free
 * list. Fills table when it is not NULL; takes no references. */
static uint32_t walk_prefix(const kv_cache_t *self, const request_t *r, uint64_t epoch,
                            uint32_t *table, uint32_t *n_free_out)
{
    uint32_t n = 0, n_free = 0;
    if (self->caching && r->n_tokens > 0 && !request_scores_prompt(r)) {
        uint32_t limit = (r->n_tokens - 1) / self->block_size; /* a token is left to compute */
        uint64_t parent = 0;
        for (; n < limit; n++) {
            block_key_t key = make_key(self, r, n, parent, epoch);
            uint32_t b = table_find(self, &key);
            if (b == NIL) {
                break;
            }
            if (table != NULL) {
                table[n] = b;
            }
            n_free += self->blocks[b].ref == 0;
            parent = self->blocks[b].serial;
        }
    }
    if (n_free_out != NULL) {
        *n_free_out = n_free;
    }
    return n;
}

static void take(kv_cache_t *self, uint32_t b)
{
    if (self->blocks[b].ref++ == 0) {
        free_list_remove(self, b);
    }
}

static void give(kv_cache_t *self, uint32_t b)
{
    block_t *blk = &self->blocks[b];
    CHECK(blk->ref > 0);
    if (--blk->ref > 0) {
        return;
    }
    if (blk->serial != 0) {
        free_list_push_tail(self, b);
    } else {
        free_list_push_head(self, b);
    }
}

bool kv_cache_match(kv_cache_t *self, request_t *r, uint64_t epoch)
{
    CHECK(r->n_blocks == 0 && r->n_computed == 0 && r->n_kv_spans == 0);
    uint32_t most = LK_MIN(blocks_for(self, r->cap_tokens), self->num_blocks);
    if (r->cap_blocks < most) {
        uint32_t *table = realloc(r->blocks, most * sizeof *table);
        if (table == NULL) {
            return false;
        }
        r->blocks = table;
        r->cap_blocks = most;
    }
    r->n_blocks = walk_prefix(self, r, epoch, r->blocks, NULL);
    for (uint32_t i = 0; i < r->n_blocks; i++) {
        take(self, r->blocks[i]);
    }
    r->n_computed = r->n_blocks * self->block_size;
    if (r->n_computed > 0) {
        CHECK(request_append_kv_span(r, 0, r->n_computed, epoch));
    }
    if (self->caching && !request_scores_prompt(r)) {
        self->stats.queries += r->n_tokens;
        self->stats.hits += r->n_computed;
    }
    return true;
}

uint32_t kv_cache_peek(const kv_cache_t *self, const request_t *r, uint64_t epoch)
{
    return walk_prefix(self, r, epoch, NULL, NULL) * self->block_size;
}

bool kv_cache_fits(const kv_cache_t *self, const request_t *r, uint64_t epoch, uint32_t n_positions)
{
    uint32_t n_free;
    uint32_t n_cached = walk_prefix(self, r, epoch, NULL, &n_free);
    uint32_t need = blocks_for(self, n_positions);
    return need <= n_cached || need - n_cached <= self->n_free - n_free;
}

bool kv_cache_grow(kv_cache_t *self, request_t *r, uint32_t n_positions)
{
    uint32_t need = blocks_for(self, n_positions);
    if (need <= r->n_blocks) {
        return true;
    }
    if (need - r->n_blocks > self->n_free) {
        return false;
    }
    CHECK(need <= r->cap_blocks);
    while (r->n_blocks < need) {
        uint32_t b = self->free_head;
        if (self->blocks[b].serial != 0) {
            table_remove(self, b);
            self->stats.evictions++;
        }
        take(self, b);
        r->blocks[r->n_blocks++] = b;
    }
    return true;
}

/* Enters r's full block i, or gives it up for an equal one that is cached already. */
static void enter_block(kv_cache_t *self, request_t *r, uint32_t i, uint64_t epoch)
{
    uint64_t parent = i == 0 ? 0 : self->blocks[r->blocks[i - 1]].serial;
    if (i > 0 && parent == 0) {
        return; /* the chain was cut by kv_cache_reset_prefixes */
    }
    block_key_t key = make_key(self, r, i, parent, epoch);
    uint32_t known = table_find(self, &key);
    if (known == NIL) {
        table_insert(self, r->blocks[i], &key);
        return;
    }
    CHECK(known != r->blocks[i]);
    take(self, known);
    give(self, r->blocks[i]);
    r->blocks[i] = known;
}

bool kv_cache_computed(kv_cache_t *self, request_t *r, uint32_t start, uint32_t end, uint64_t epoch)
{
    CHECK(start == r->n_computed && end <= r->n_tokens);
    CHECK(blocks_for(self, end) <= r->n_blocks);
    if (!request_append_kv_span(r, start, end, epoch)) {
        return false;
    }
    r->n_computed = end;
    if (self->caching) {
        /* one epoch from position 0 on: beyond the first span nothing is entered */
        uint32_t full = LK_MIN(end, r->kv_spans[0].end) / self->block_size;
        for (uint32_t i = start / self->block_size; i < full; i++) {
            enter_block(self, r, i, epoch);
        }
    }
    return true;
}

void kv_cache_release(kv_cache_t *self, request_t *r)
{
    /* the end of a sequence first: it is evicted first, and a prefix outlives what follows it */
    while (r->n_blocks > 0) {
        give(self, r->blocks[--r->n_blocks]);
    }
    r->n_computed = 0;
    r->n_kv_spans = 0;
}

bool kv_cache_reset_prefixes(kv_cache_t *self)
{
    for (uint32_t b = 0; b < self->num_blocks; b++) {
        if (self->blocks[b].serial != 0) {
            table_remove(self, b);
        }
    }
    return kv_cache_used(self) == 0;
}

uint32_t kv_cache_block_size(const kv_cache_t *self)
{
    return self->block_size;
}

uint32_t kv_cache_num_blocks(const kv_cache_t *self)
{
    return self->num_blocks;
}

uint32_t kv_cache_references(const kv_cache_t *self, uint32_t block)
{
    CHECK(block < self->num_blocks);
    return self->blocks[block].ref;
}

uint32_t kv_cache_used(const kv_cache_t *self)
{
    return self->num_blocks - self->n_free;
}

void kv_cache_stats(const kv_cache_t *self, kv_cache_stats_t *out)
{
    *out = self->stats;
}

static void verify_request(const kv_cache_t *self, const request_t *r, uint32_t *refs)
{
    CHECK(r->n_computed <= r->n_tokens && blocks_for(self, r->n_computed) <= r->n_blocks);
    uint32_t at = 0;
    for (uint32_t s = 0; s < r->n_kv_spans; s++) {
        CHECK(r->kv_spans[s].start == at && r->kv_spans[s].end > at);
        CHECK(s == 0 || r->kv_spans[s].epoch != r->kv_spans[s - 1].epoch);
        at = r->kv_spans[s].end;
    }
    CHECK(at == r->n_computed);
    for (uint32_t i = 0; i < r->n_blocks; i++) {
        uint32_t b = r->blocks[i];
        CHECK(b < self->num_blocks);
        refs[b]++;
        const block_t *blk = &self->blocks[b];
        if (blk->serial == 0) {
            continue; /* partly filled, of mixed epochs, or cut off by a reset */
        }
        CHECK((uint64_t)(i + 1) * self->block_size <= r->kv_spans[0].end);
        CHECK(blk->epoch == r->kv_spans[0].epoch && lk_hash128_equal(blk->salt, r->salt));
        CHECK(blk->parent == (i == 0 ? 0 : self->blocks[r->blocks[i - 1]].serial));
        CHECK(i == 0 || blk->parent != 0);
        CHECK(memcmp(self->tokens + (size_t)b * self->block_size,
                     r->tokens + (size_t)i * self->block_size,
                     self->block_size * sizeof *r->tokens) == 0);
    }
}

static void verify_free_list(const kv_cache_t *self)
{
    uint32_t n = 0, last = NIL;
    for (uint32_t b = self->free_head; b != NIL; b = self->blocks[b].next) {
        CHECK(self->blocks[b].ref == 0 && self->blocks[b].prev == last);
        CHECK(++n <= self->num_blocks);
        last = b;
    }
    CHECK(last == self->free_tail && n == self->n_free);
}

static void verify_table(const kv_cache_t *self)
{
    uint32_t in_table = 0, cached = 0;
    for (uint32_t i = 0; i <= self->bucket_mask; i++) {
        for (uint32_t b = self->buckets[i]; b != NIL; b = self->blocks[b].hash_next) {
            const block_t *blk = &self->blocks[b];
            CHECK(blk->serial != 0 && blk->serial <= self->next_serial);
            CHECK((blk->hash & self->bucket_mask) == i && blk->parent < blk->serial);
            CHECK(++in_table <= self->num_blocks);
            for (uint32_t o = blk->hash_next; o != NIL; o = self->blocks[o].hash_next) {
                CHECK(self->blocks[o].serial != blk->serial);
                block_key_t key = {.parent = blk->parent,
                                   .epoch = blk->epoch,
                                   .salt = blk->salt,
                                   .tokens = self->tokens + (size_t)b * self->block_size,
                                   .hash = blk->hash};
                CHECK(!key_equal(self, o, &key));
            }
        }
    }
    for (uint32_t b = 0; b < self->num_blocks; b++) {
        cached += self->blocks[b].serial != 0;
    }
    CHECK(in_table == cached && (self->caching || cached == 0));
}

void kv_cache_verify(const kv_cache_t *self, request_t *const *requests, size_t n)
{
    uint32_t *refs = calloc(self->num_blocks, sizeof *refs);
    CHECK(refs != NULL);
    for (size_t i = 0; i < n; i++) {
        verify_request(self, requests[i], refs);
    }
    uint32_t n_free = 0;
    for (uint32_t b = 0; b < self->num_blocks; b++) {
        CHECKF(refs[b] == self->blocks[b].ref, "block %u: %u users, %u references", b, refs[b],
               self->blocks[b].ref);
        n_free += refs[b] == 0;
    }
    CHECK(n_free == self->n_free);
    verify_free_list(self);
    verify_table(self);
    free(refs);
}
