/*
 * completion_params.h: the body of POST /v1/completions or /inference/v1/generate, checked
 * completely before anything is sent. Pure: JSON in, parameters or an error that names the field
 * out. /inference/v1/generate takes one prompt of token_ids; what concerns sampling stands in its
 * object sampling_params, and max_tokens defaults to all the room there is.
 */
#ifndef LK_API_FRONTEND_COMPLETION_PARAMS_H
#define LK_API_FRONTEND_COMPLETION_PARAMS_H

#include "api_frontend/tokenizer/tokenizer.h"
#include "proto/messages.h"

#include <jansson.h>

#define COMPLETION_MAX_PROMPTS  4096
#define COMPLETION_MAX_CHOICES  4096 /* prompts * n */
#define COMPLETION_MAX_STOPS    64
#define COMPLETION_MAX_STOP_IDS 64
#define COMPLETION_MAX_SALT     1024 /* bytes */
#define COMPLETION_MAX_ID       128  /* bytes of a request_id */
/* Logprobs of one reply's tokens, or prompts; each takes 8 bytes. Those of a call that wants more
 * than COMPLETION_FEW_LOGPROBS per token come faster than this front end writes them (some millions
 * a second): fewer per call, and all such calls together are bounded (api.h). */
#define COMPLETION_MAX_LOGPROBS  (64u << 20)
#define COMPLETION_FEW_LOGPROBS  20
#define COMPLETION_MANY_LOGPROBS (4u << 20)

typedef enum { COMPLETION_OPENAI, COMPLETION_GENERATE } completion_kind_t;

/* What this server can do. */
typedef struct {
    const char *model;
    uint64_t max_model_len, vocab_size;
    int64_t max_logprobs;         /* per token; -1: vocab_size */
    const tokenizer_t *tokenizer; /* NULL: ids only */
} completion_limits_t;

typedef struct {
    uint32_t *ids;
    size_t n;
    const char *text; /* as it was sent, borrowed from the JSON; NULL: as ids */
    size_t text_len;
} prompt_ids_t;

typedef struct {
    completion_kind_t kind;
    const char *request_id; /* borrowed; NULL: none */
    bool text;              /* the reply has text */
    prompt_ids_t *prompts;
    size_t n_prompts;
    uint64_t n;              /* choices per prompt */
    msg_sampling_t sampling; /* its stop_token_ids point at stop_ids; max_tokens is 0 for "all the
                                room there is" */
    int64_t prompt_logprobs; /* as it was given, -1: not. sampling.prompt_logprobs is also set where
                                an echo needs them */
    uint64_t reserved_logprobs; /* the most that the call can take, when it wants many; else 0 */
    bool echo, echo_only;       /* the prompt is part of the reply; nothing else is */
    bool has_seed;
    uint32_t *stop_ids;
    uint32_t *bias_ids; /* what sampling's fields of the same names point at */
    float *bias_values;
    uint32_t *allowed_ids, *bad_ids;
    const char **stops; /* borrowed from the JSON */
    size_t n_stops;
    int64_t priority;
    const char *cache_salt; /* borrowed; NULL: none */
    bool stream, include_usage;
    bool return_token_ids, return_tokens_as_token_ids, return_kv_history, return_seed;
    bool skip_special_tokens, include_stop_str_in_output, add_special_tokens;
} completion_params_t;

/* Parses body, which must outlive *out. On an error *param is the field's name ("" if none).
 * LK_ERR_NOT_FOUND: another model; LK_ERR_UNSUPPORTED, LK_ERR_INVALID: 400. */
LK_MUST_USE lk_status_t completion_params_parse(completion_kind_t kind, const json_t *body,
                                                const completion_limits_t *limits,
                                                completion_params_t *out, const char **param,
                                                lk_error_t *err);
/* Accepts NULL and zeroed parameters. */
void completion_params_fini(completion_params_t *self);
/* max_tokens of a prompt: what was asked for, or the room that is left. */
uint64_t completion_params_max_tokens(const completion_params_t *self, size_t prompt,
                                      const completion_limits_t *limits);

#endif
