/* completion_prompt.c: the prompts of a completion's body: ids as they are, texts through the
 * tokenizer, all within the vocabulary and the model's length. Of completion_params.h. */
#include "api_frontend/completion_parse.h"

#include <inttypes.h>
#include <stdlib.h>

static lk_status_t parse_id(completion_parse_t *p, const char *name, const json_t *value, size_t i,
                            uint32_t *out)
{
    if (!json_is_integer(value)) {
        return REFUSE(p, name, "%s[%zu] must be a token id, not %s", name, i,
                      completion_kind_name(value));
    }
    json_int_t id = json_integer_value(value);
    if (id < 0 || (uint64_t)id >= p->limits->vocab_size) {
        return REFUSE(p, name,
                      "%s[%zu] is token id %" PRId64 ", outside the vocabulary of %" PRIu64, name,
                      i, (int64_t)id, p->limits->vocab_size);
    }
    *out = (uint32_t)id;
    return LK_OK;
}

lk_status_t completion_parse_ids(completion_parse_t *p, const char *name, const json_t *array,
                                 uint32_t *ids)
{
    for (size_t i = 0; i < json_array_size(array); i++) {
        LK_RETURN_IF_ERROR(parse_id(p, name, json_array_get(array, i), i, &ids[i]));
    }
    return LK_OK;
}

lk_status_t completion_no_tokenizer(completion_parse_t *p, const char *name)
{
    *p->param = name;
    return lk_error_set(p->err, LK_ERR_UNSUPPORTED,
                        "%s is text, but the checkpoint has no tokenizer.json: send token ids",
                        name);
}

static lk_status_t check_length(completion_parse_t *p, size_t n_ids)
{
    uint64_t room = p->limits->max_model_len, max_tokens = p->out->sampling.max_tokens;
    if (n_ids == 0) {
        return REFUSE(p, p->prompt, "%s must hold at least one token", p->prompt);
    }
    if (n_ids >= room) {
        return REFUSE(p, p->prompt,
                      "This model's maximum context length is %" PRIu64
                      " tokens, but the prompt has %zu and one must be generated",
                      room, n_ids);
    }
    if (max_tokens > room - n_ids) {
        return REFUSE(p, "max_tokens",
                      "This model's maximum context length is %" PRIu64 " tokens, but %" PRIu64
                      " were asked for: %zu in the prompt and %" PRIu64 " of max_tokens",
                      room, n_ids + max_tokens, n_ids, max_tokens);
    }
    return LK_OK;
}

static lk_status_t add_ids(completion_parse_t *p, const json_t *array)
{
    size_t n = json_array_size(array);
    if (n >= p->limits->max_model_len) { /* before the memory for them is taken */
        return check_length(p, n);
    }
    prompt_ids_t *prompt = &p->out->prompts[p->out->n_prompts];
    prompt->ids = calloc(n + 1, sizeof prompt->ids[0]);
    if (prompt->ids == NULL) {
        return lk_error_set(p->err, LK_ERR_NO_MEMORY, "out of memory");
    }
    prompt->n = n;
    p->out->n_prompts++;
    LK_RETURN_IF_ERROR(completion_parse_ids(p, p->prompt, array, prompt->ids));
    return check_length(p, n);
}

static lk_status_t add_text(completion_parse_t *p, const json_t *text)
{
    if (p->limits->tokenizer == NULL) {
        return completion_no_tokenizer(p, "prompt");
    }
    prompt_ids_t *prompt = &p->out->prompts[p->out->n_prompts];
    *p->param = "prompt";
    unsigned flags = TOKENIZER_PARSE_SPECIAL;
    flags |= p->out->add_special_tokens ? TOKENIZER_ADD_SPECIAL : 0;
    LK_RETURN_IF_ERROR(tokenizer_encode(p->limits->tokenizer, json_string_value(text),
                                        json_string_length(text), flags, &prompt->ids, &prompt->n,
                                        p->err));
    *p->param = "";
    prompt->text = json_string_value(text);
    prompt->text_len = json_string_length(text);
    p->out->n_prompts++;
    for (size_t i = 0; i < prompt->n; i++) {
        if (prompt->ids[i] >= p->limits->vocab_size) {
            return REFUSE(p, "prompt", "the tokenizer gives id %u, outside the model's %" PRIu64,
                          prompt->ids[i], p->limits->vocab_size);
        }
    }
    return check_length(p, prompt->n);
}

/* A string, ids, or an array of either; of /inference/v1/generate ids. */
lk_status_t completion_parse_prompt(completion_parse_t *p)
{
    p->from = p->body;
    const json_t *value = completion_get(p, p->prompt);
    if (p->kind == COMPLETION_GENERATE && !json_is_array(value)) {
        return REFUSE(p, p->prompt, "token_ids must be an array of token ids, not %s",
                      completion_kind_name(value));
    }
    bool one = p->kind == COMPLETION_GENERATE || json_is_string(value) ||
               (json_is_array(value) && json_is_integer(json_array_get(value, 0)));
    if (value == NULL) {
        return REFUSE(
            p, "prompt",
            "prompt is missing: a string, an array of strings, of token ids, or of arrays "
            "of token ids");
    }
    if (!one && !(json_is_array(value) && json_array_size(value) > 0)) {
        return REFUSE(p, "prompt",
                      "prompt must be a string, an array of strings, of token ids, or of arrays of "
                      "token ids, not %s",
                      json_is_array(value) ? "an empty array" : completion_kind_name(value));
    }
    size_t n = one ? 1 : json_array_size(value);
    if (n > COMPLETION_MAX_PROMPTS || n * p->out->n > COMPLETION_MAX_CHOICES) {
        return REFUSE(p, "prompt",
                      "%zu prompts with n = %" PRIu64 " are too many: at most %d choices", n,
                      p->out->n, COMPLETION_MAX_CHOICES);
    }
    p->out->prompts = calloc(n, sizeof p->out->prompts[0]);
    if (p->out->prompts == NULL) {
        return lk_error_set(p->err, LK_ERR_NO_MEMORY, "out of memory");
    }
    for (size_t i = 0; i < n; i++) {
        const json_t *item = one ? value : json_array_get(value, i);
        if (json_is_string(item)) {
            LK_RETURN_IF_ERROR(add_text(p, item));
        } else if (json_is_array(item)) {
            LK_RETURN_IF_ERROR(add_ids(p, item));
        } else {
            return REFUSE(p, "prompt",
                          "prompt[%zu] must be a string or an array of token ids, not %s", i,
                          completion_kind_name(item));
        }
    }
    return LK_OK;
}
