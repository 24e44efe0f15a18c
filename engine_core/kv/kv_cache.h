/*
 * kv_cache.h: the bookkeeping of paged KV memory: block reference counts, the free list (least
 * recently used first), and the prefix cache. Physical memory belongs to the executor.
 *
 * A full block enters the prefix cache only if all it holds and all before it is of one epoch. Its
 * key is (identity of the cached block before it, its tokens), that of a first block (epoch, salt,
 * its tokens); keys are compared whole, so neither KV of other weights nor a hash collision that
 * somebody constructed ever matches. A cached block with no user stays in the free list until it is
 * evicted. Two requests that compute the same block share one: the later one's table is changed to
 * the cached block when its own is full (equal by the executor's invariance).
 */
#ifndef LK_ENGINE_CORE_KV_KV_CACHE_H
#define LK_ENGINE_CORE_KV_KV_CACHE_H

#include "engine_core/request.h"

typedef struct kv_cache kv_cache_t;

/* NULL when out of memory. num_blocks and block_size are at least 1. */
kv_cache_t *kv_cache_new(uint32_t num_blocks, uint32_t block_size, bool enable_prefix_caching);
void kv_cache_destroy(kv_cache_t **self_p);

/* Longest cached prefix of r's tokens under `epoch` (whole blocks; at least one token is always
 * left to compute; none of a request that scores its prompt). Takes references and fills r->blocks,
 * n_blocks, n_computed, kv_spans. r has no blocks. Allocates r's block table for all it can ever
 * hold; false, and nothing changed, if out of memory. */
LK_MUST_USE bool kv_cache_match(kv_cache_t *self, request_t *r, uint64_t epoch);
/* How many tokens kv_cache_match would find, without taking them. */
uint32_t kv_cache_peek(const kv_cache_t *self, const request_t *r, uint64_t epoch);
/* Whether match and then grow to n_positions would succeed; counts nothing in the statistics. */
bool kv_cache_fits(const kv_cache_t *self, const request_t *r, uint64_t epoch,
                   uint32_t n_positions);
/* Extends r's block table to hold `n_positions`. False, and nothing changed, when blocks are short.
 */
LK_MUST_USE bool kv_cache_grow(kv_cache_t *self, request_t *r, uint32_t n_positions);
/* Positions [start, end) of r were computed under epoch: records spans, sets n_computed, enters
 * full blocks. start is r->n_computed. False when r can't record more spans (request.h): end it. */
LK_MUST_USE bool kv_cache_computed(kv_cache_t *self, request_t *r, uint32_t start, uint32_t end,
                                   uint64_t epoch);
/* Gives all of r's blocks back; n_computed = 0, no kv_spans. Legal without blocks. */
void kv_cache_release(kv_cache_t *self, request_t *r);
/* Forgets every cached prefix, also of blocks that requests hold (what these compute later is not
 * entered either). True if no block was held by a request. */
bool kv_cache_reset_prefixes(kv_cache_t *self);

uint32_t kv_cache_block_size(const kv_cache_t *self);
uint32_t kv_cache_num_blocks(const kv_cache_t *self);
/* Blocks held by requests. */
uint32_t kv_cache_used(const kv_cache_t *self);
/* How many block tables name the block. For tests and the simulator. */
uint32_t kv_cache_references(const kv_cache_t *self, uint32_t block);
typedef struct {
    uint64_t queries, hits; /* tokens */
    uint64_t evictions;
} kv_cache_stats_t;
void kv_cache_stats(const kv_cache_t *self, kv_cache_stats_t *out);
/* CHECKs every invariant: refcounts, free list, keys. For tests and the simulator. */
void kv_cache_verify(const kv_cache_t *self, request_t *const *requests, size_t n);

#endif
