#include "engine_core/exec/logit_rules.h"
#include "base/check.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

struct logit_rules {
    uint32_t vocab_size;
    uint32_t n_biases, n_allowed, n_bad; /* n_bad: entries of bad, lengths included */
    uint32_t *bias_ids;
    float *biases;
    uint32_t *allowed; /* sorted, without repetitions */
    uint32_t *bad;     /* length, ids, length, ids... */
};

void logit_rules_destroy(logit_rules_t **self_p)
{
    logit_rules_t *self = *self_p;
    if (self == NULL) {
        return;
    }
    free(self->bias_ids);
    free(self->biases);
    free(self->allowed);
    free(self->bad);
    free(self);
    *self_p = NULL;
}

/* ---- reading ---- */

static lk_status_t copy_words(msg_bin_t bin, uint32_t most, const char *field, uint32_t **out,
                              uint32_t *n, lk_error_t *err)
{
    if (bin.len % sizeof(uint32_t) != 0 || bin.len / sizeof(uint32_t) > most) {
        return lk_error_set(err, LK_ERR_INVALID,
                            "%s: %zu bytes; at most %u entries of 4 are "
                            "possible",
                            field, bin.len, most);
    }
    if (bin.len == 0) {
        return LK_OK;
    }
    *out = malloc(bin.len);
    if (*out == NULL) {
        return lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory");
    }
    memcpy(*out, bin.data, bin.len);
    *n = (uint32_t)(bin.len / sizeof(uint32_t));
    return LK_OK;
}

static lk_status_t check_id(const logit_rules_t *self, uint32_t id, const char *field,
                            lk_error_t *err)
{
    return id < self->vocab_size ? LK_OK
                                 : lk_error_set(err, LK_ERR_INVALID,
                                                "%s: token id %u is outside the vocabulary of %u",
                                                field, id, self->vocab_size);
}

static lk_status_t read_biases(logit_rules_t *self, const msg_sampling_t *m, lk_error_t *err)
{
    uint32_t n = 0, *values = NULL;
    LK_RETURN_IF_ERROR(copy_words(m->bias_ids, LOGIT_RULES_MAX_BIASES, "logit_bias",
                                  &self->bias_ids, &self->n_biases, err));
    LK_RETURN_IF_ERROR(
        copy_words(m->bias_values, LOGIT_RULES_MAX_BIASES, "logit_bias", &values, &n, err));
    self->biases = (float *)values;
    if (n != self->n_biases) {
        return lk_error_set(err, LK_ERR_INVALID, "logit_bias: %u ids with %u values",
                            self->n_biases, n);
    }
    for (uint32_t i = 0; i < n; i++) {
        LK_RETURN_IF_ERROR(check_id(self, self->bias_ids[i], "logit_bias", err));
        if (!(fabsf(self->biases[i]) <= LOGIT_RULES_MAX_BIAS)) {
            return lk_error_set(err, LK_ERR_INVALID, "logit_bias must be from -%d to %d, is %g",
                                LOGIT_RULES_MAX_BIAS, LOGIT_RULES_MAX_BIAS,
                                (double)self->biases[i]);
        }
    }
    return LK_OK;
}

static int by_value(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return x < y ? -1 : x > y;
}

static lk_status_t read_allowed(logit_rules_t *self, const msg_sampling_t *m, lk_error_t *err)
{
    uint32_t n = 0;
    LK_RETURN_IF_ERROR(copy_words(m->allowed_token_ids, LOGIT_RULES_MAX_ALLOWED,
                                  "allowed_token_ids", &self->allowed, &n, err));
    if (n == 0) {
        return LK_OK;
    }
    qsort(self->allowed, n, sizeof self->allowed[0], by_value);
    for (uint32_t i = 0; i < n; i++) {
        LK_RETURN_IF_ERROR(check_id(self, self->allowed[i], "allowed_token_ids", err));
        if (i == 0 || self->allowed[i] != self->allowed[i - 1]) {
            self->allowed[self->n_allowed++] = self->allowed[i];
        }
    }
    return LK_OK;
}

static lk_status_t read_bad_words(logit_rules_t *self, const msg_sampling_t *m, lk_error_t *err)
{
    LK_RETURN_IF_ERROR(copy_words(m->bad_words, LOGIT_RULES_MAX_BAD_IDS, "bad_words", &self->bad,
                                  &self->n_bad, err));
    for (uint32_t i = 0; i < self->n_bad;) {
        uint32_t len = self->bad[i++];
        if (len == 0 || len > self->n_bad - i) {
            return lk_error_set(err, LK_ERR_INVALID, "bad_words: a word of %u ids, %u are left",
                                len, self->n_bad - i);
        }
        for (uint32_t end = i + len; i < end; i++) {
            LK_RETURN_IF_ERROR(check_id(self, self->bad[i], "bad_words", err));
        }
    }
    return LK_OK;
}

lk_status_t logit_rules_read(const msg_sampling_t *m, uint32_t vocab_size, logit_rules_t **out,
                             lk_error_t *err)
{
    *out = NULL;
    if (m->bias_ids.len + m->bias_values.len + m->allowed_token_ids.len + m->bad_words.len == 0) {
        return LK_OK;
    }
    logit_rules_t *self = calloc(1, sizeof *self);
    if (self == NULL) {
        return lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory");
    }
    self->vocab_size = vocab_size;
    lk_status_t status = read_biases(self, m, err);
    status = status == LK_OK ? read_allowed(self, m, err) : status;
    status = status == LK_OK ? read_bad_words(self, m, err) : status;
    if (status != LK_OK) {
        logit_rules_destroy(&self);
        return status;
    }
    *out = self;
    return LK_OK;
}

/* ---- applying ---- */

static void keep_allowed(const logit_rules_t *self, float *row)
{
    uint32_t next = 0;
    for (uint32_t t = 0; t < self->vocab_size; t++) {
        if (next < self->n_allowed && self->allowed[next] == t) {
            next++;
        } else {
            row[t] = -INFINITY;
        }
    }
}

static void ban_bad_words(const logit_rules_t *self, const uint32_t *output, uint32_t n_output,
                          float *row)
{
    for (uint32_t i = 0; i < self->n_bad;) {
        uint32_t len = self->bad[i++], before = len - 1;
        const uint32_t *word = self->bad + i;
        if (before <= n_output && (before == 0 || memcmp(output + n_output - before, word,
                                                         before * sizeof word[0]) == 0)) {
            row[word[before]] = -INFINITY;
        }
        i += len;
    }
}

void logit_rules_apply(const logit_rules_t *self, const uint32_t *output, uint32_t n_output,
                       float *row)
{
    if (self->n_allowed > 0) {
        keep_allowed(self, row);
    }
    ban_bad_words(self, output, n_output, row);
    for (uint32_t i = 0; i < self->n_biases; i++) {
        row[self->bias_ids[i]] += self->biases[i];
    }
}
