/* completion_parse.h: what the files that parse a completion's body share. Of
 * completion_params.c. */
#ifndef LK_API_FRONTEND_COMPLETION_PARSE_H
#define LK_API_FRONTEND_COMPLETION_PARSE_H

#include "api_frontend/completion_params.h"

typedef struct {
    completion_kind_t kind;
    const json_t *body;
    const json_t *from; /* the object that completion_get reads: body, or its sampling_params */
    const char *prompt; /* "prompt" or "token_ids" */
    const completion_limits_t *limits;
    completion_params_t *out;
    const char **param;
    lk_error_t *err;
} completion_parse_t;

#define REFUSE(p, name, ...)                                                                       \
    (*(p)->param = (name), lk_error_set((p)->err, LK_ERR_INVALID, __VA_ARGS__))

/* The field, or NULL when it is absent or null. */
const json_t *completion_get(const completion_parse_t *p, const char *name);
/* "an array"; "nothing" for NULL. */
const char *completion_kind_name(const json_t *value);
/* Sets p->from to where the fields of sampling stand. */
LK_MUST_USE lk_status_t completion_find_sampling(completion_parse_t *p);
/* ids: room for the array's. */
LK_MUST_USE lk_status_t completion_parse_ids(completion_parse_t *p, const char *name,
                                             const json_t *array, uint32_t *ids);
/* LK_ERR_UNSUPPORTED: the field is text. */
LK_MUST_USE lk_status_t completion_no_tokenizer(completion_parse_t *p, const char *name);

LK_MUST_USE lk_status_t completion_parse_integer(completion_parse_t *p, const char *name,
                                                 int64_t least, int64_t most, int64_t *out);
/* completion_prompt.c: prompt or token_ids; the last of the fields, as it may be large. */
LK_MUST_USE lk_status_t completion_parse_prompt(completion_parse_t *p);

/* completion_logprobs.c: logprobs and prompt_logprobs; then whether a reply can hold them. */
LK_MUST_USE lk_status_t completion_parse_logprobs(completion_parse_t *p);
LK_MUST_USE lk_status_t completion_check_logprobs(completion_parse_t *p);

/* completion_rules.c: logit_bias, allowed_token_ids, bad_words. */
LK_MUST_USE lk_status_t completion_parse_rules(completion_parse_t *p);

#endif
