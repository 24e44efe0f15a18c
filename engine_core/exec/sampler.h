/*
 * sampler.h: logits to a token. A pure function of (logits row, parameters, the request's tokens,
 * output position): Philox with key (seed, choice) and counter = output position, so that a token
 * does not depend on its neighbours. (Philox's key has 64 bits: key words = seed, counter words =
 * output position, choice, 0, 0. The draw is the upper 53 bits of the first two output words.)
 *
 * Order: the request's rules (logit_rules.h: allowed ids, bad words, biases), penalties (repetition
 * over prompt and output, then frequency and presence over output), banned ids, temperature, top-k,
 * top-p, min-p, then the draw by inverting the cumulative distribution in token-id order.
 * temperature 0 is argmax with the lowest id among equals. The filters keep a prefix of the order
 * (more likely first, then lower id): exactly k; the shortest with at least top_p of the mass that
 * top-k left; those with at least min_p of the best's probability. Logprobs are raw by default:
 * log-softmax of the logits as the model gave them (vLLM's "raw_logprobs"); `processed` gives those
 * after the steps above. Ranks belong to the same values. Top-k logprobs are ordered by logprob,
 * then id.
 */
#ifndef LK_ENGINE_CORE_EXEC_SAMPLER_H
#define LK_ENGINE_CORE_EXEC_SAMPLER_H

#include "engine_core/request.h"

typedef struct sampler sampler_t;

/* Keeps scratch memory of a few rows; one thread at a time. NULL when out of memory. */
sampler_t *sampler_new(uint32_t vocab_size, bool processed_logprobs);
void sampler_destroy(sampler_t **self_p);

typedef struct {
    uint32_t token;
    float logprob;
    uint32_t rank;           /* 1 + number of tokens strictly more likely */
    uint32_t n_top;          /* least of what was asked for and vocab_size */
    const uint32_t *top_ids; /* the sampler's own; until its next call */
    const float *top_logprobs;
} sample_t;

/* A top entry without a token: processed logprobs have only those that are left to draw from. Its
 * logprob is -inf. */
#define SAMPLER_NO_TOKEN UINT32_MAX

/* logits: [vocab_size], not changed. banned: ids that must not be drawn (others than the
 * vocabulary's are ignored). logprob, rank and top are filled when r->sampling.logprobs >= 0.
 * LK_ERR_INTERNAL when the row holds a NaN or +inf, or nothing is left to choose from. No
 * allocation. */
LK_MUST_USE lk_status_t sampler_sample(sampler_t *self, const request_t *r, const float *logits,
                                       const uint32_t *banned, size_t n_banned, sample_t *out,
                                       lk_error_t *err);
/* The logprob of r's token `index`, given the logits of the position before it; rank and the k most
 * likely as above. Processed ones are what it would have been drawn from, had the prompt ended
 * before it (without min_tokens). index is at least 1 and in r's prompt. Errors as above. */
LK_MUST_USE lk_status_t sampler_score(sampler_t *self, const request_t *r, uint32_t index,
                                      const float *logits, uint32_t k, sample_t *out,
                                      lk_error_t *err);
/* log-softmax of one entry, and its rank. */
void sampler_logprob(sampler_t *self, const float *logits, uint32_t token, float *logprob,
                     uint32_t *rank);

#endif
