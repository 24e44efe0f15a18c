/* completion_rules.c: which ids a client allows, forbids or favours (engine_core/exec/logit_rules.h
 * carries it out). */
#include "api_frontend/completion_parse.h"
#include "base/check.h"
#include "engine_core/exec/logit_rules.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static lk_status_t out_of_memory(completion_parse_t *p)
{
    return lk_error_set(p->err, LK_ERR_NO_MEMORY, "out of memory");
}

/* {"id": number} with the id as text, as JSON has it. */
static lk_status_t parse_bias(completion_parse_t *p)
{
    static const char name[] = "logit_bias";
    completion_params_t *out = p->out;
    const json_t *value = completion_get(p, name), *item;
    size_t n = json_object_size(value), i = 0;
    if (value == NULL) {
        return LK_OK;
    }
    if (!json_is_object(value) || n > LOGIT_RULES_MAX_BIASES) {
        return REFUSE(p, name, "logit_bias must be an object of at most %d token ids, not %s",
                      LOGIT_RULES_MAX_BIASES,
                      json_is_object(value) ? "one of more" : completion_kind_name(value));
    }
    out->bias_ids = calloc(n + 1, sizeof out->bias_ids[0]);
    out->bias_values = calloc(n + 1, sizeof out->bias_values[0]);
    if (out->bias_ids == NULL || out->bias_values == NULL) {
        return out_of_memory(p);
    }
    const char *key;
    json_object_foreach((json_t *)value, key, item)
    {
        char *tail;
        unsigned long long id = strtoull(key, &tail, 10);
        if (key[0] < '0' || key[0] > '9' || *tail != '\0' || id >= p->limits->vocab_size) {
            return REFUSE(p, name,
                          "logit_bias: \"%.32s\" is no token id of the vocabulary of %" PRIu64, key,
                          p->limits->vocab_size);
        }
        double bias = json_number_value(item);
        if (!json_is_number(item) || !(fabs(bias) <= LOGIT_RULES_MAX_BIAS)) {
            return REFUSE(p, name, "logit_bias of %llu must be a number from -%d to %d", id,
                          LOGIT_RULES_MAX_BIAS, LOGIT_RULES_MAX_BIAS);
        }
        out->bias_ids[i] = (uint32_t)id;
        out->bias_values[i++] = (float)bias;
    }
    out->sampling.bias_ids = (msg_bin_t){out->bias_ids, n * sizeof out->bias_ids[0]};
    out->sampling.bias_values = (msg_bin_t){out->bias_values, n * sizeof out->bias_values[0]};
    return LK_OK;
}

static lk_status_t parse_allowed(completion_parse_t *p)
{
    static const char name[] = "allowed_token_ids";
    completion_params_t *out = p->out;
    const json_t *value = completion_get(p, name);
    size_t n = json_array_size(value);
    if (value == NULL) {
        return LK_OK;
    }
    if (n == 0 || n > LOGIT_RULES_MAX_ALLOWED) {
        return REFUSE(p, name, "allowed_token_ids must be an array of 1 to %u token ids",
                      LOGIT_RULES_MAX_ALLOWED);
    }
    out->allowed_ids = calloc(n, sizeof out->allowed_ids[0]);
    if (out->allowed_ids == NULL) {
        return out_of_memory(p);
    }
    LK_RETURN_IF_ERROR(completion_parse_ids(p, name, value, out->allowed_ids));
    out->sampling.allowed_token_ids = (msg_bin_t){out->allowed_ids, n * sizeof(uint32_t)};
    return LK_OK;
}

/* Appends length and ids. */
static lk_status_t add_word(completion_parse_t *p, size_t *used, const uint32_t *ids, size_t n)
{
    if (n > LOGIT_RULES_MAX_BAD_IDS || *used + n + 1 > LOGIT_RULES_MAX_BAD_IDS) {
        return REFUSE(p, "bad_words", "bad_words have more than %d tokens together",
                      LOGIT_RULES_MAX_BAD_IDS);
    }
    uint32_t *out = p->out->bad_ids + *used;
    out[0] = (uint32_t)n;
    for (size_t i = 0; i < n; i++) {
        if (ids[i] >= p->limits->vocab_size) {
            return REFUSE(p, "bad_words", "the tokenizer gives id %u, outside the model's %" PRIu64,
                          ids[i], p->limits->vocab_size);
        }
        out[1 + i] = ids[i];
    }
    *used += n + 1;
    return LK_OK;
}

/* A word as it stands at the start of a text, and as it stands behind a space where that is another
 * token of the same number (as " word" of a byte-level BPE). */
static lk_status_t add_bad_word(completion_parse_t *p, const json_t *item, size_t *used)
{
    if (!json_is_string(item) || json_string_length(item) == 0) {
        return REFUSE(p, "bad_words", "bad_words must be an array of strings, none empty");
    }
    const char *text = json_string_value(item);
    text += strspn(text, " ");
    size_t len = strlen(text);
    char *spaced = malloc(len + 2);
    if (spaced == NULL) {
        return out_of_memory(p);
    }
    spaced[0] = ' ';
    memcpy(spaced + 1, text, len + 1);
    uint32_t *plain_ids = NULL, *spaced_ids = NULL;
    size_t n_plain = 0, n_spaced = 0;
    *p->param = "bad_words";
    lk_status_t status = LK_OK;
    if (len > 0) {
        status = tokenizer_encode(p->limits->tokenizer, text, len, 0, &plain_ids, &n_plain, p->err);
    }
    if (status == LK_OK && n_plain > 0) {
        status = add_word(p, used, plain_ids, n_plain);
    }
    if (status == LK_OK) {
        status = tokenizer_encode(p->limits->tokenizer, spaced, len + 1, 0, &spaced_ids, &n_spaced,
                                  p->err);
    }
    bool other = n_plain == 0 ||
                 (n_spaced == n_plain && spaced_ids != NULL && spaced_ids[0] != plain_ids[0]);
    if (status == LK_OK && n_spaced > 0 && other) {
        status = add_word(p, used, spaced_ids, n_spaced);
    }
    free(plain_ids);
    free(spaced_ids);
    free(spaced);
    return status;
}

static lk_status_t parse_bad_words(completion_parse_t *p)
{
    static const char name[] = "bad_words";
    const json_t *value = completion_get(p, name);
    size_t n = json_array_size(value), used = 0;
    if (value == NULL) {
        return LK_OK;
    }
    if (!json_is_array(value) || n > LOGIT_RULES_MAX_BAD_WORDS) {
        return REFUSE(p, name, "bad_words must be an array of at most %d strings",
                      LOGIT_RULES_MAX_BAD_WORDS);
    }
    if (n == 0) {
        return LK_OK;
    }
    if (p->limits->tokenizer == NULL) {
        return completion_no_tokenizer(p, name);
    }
    p->out->bad_ids = calloc(LOGIT_RULES_MAX_BAD_IDS, sizeof p->out->bad_ids[0]);
    if (p->out->bad_ids == NULL) {
        return out_of_memory(p);
    }
    for (size_t i = 0; i < n; i++) {
        LK_RETURN_IF_ERROR(add_bad_word(p, json_array_get(value, i), &used));
    }
    p->out->sampling.bad_words = (msg_bin_t){p->out->bad_ids, used * sizeof(uint32_t)};
    *p->param = "";
    return LK_OK;
}

lk_status_t completion_parse_rules(completion_parse_t *p)
{
    LK_RETURN_IF_ERROR(completion_find_sampling(p));
    LK_RETURN_IF_ERROR(parse_bias(p));
    LK_RETURN_IF_ERROR(parse_allowed(p));
    return parse_bad_words(p);
}
