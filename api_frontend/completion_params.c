#include "api_frontend/completion_parse.h"
#include "base/check.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

const json_t *completion_get(const completion_parse_t *p, const char *name)
{
    const json_t *value = json_object_get(p->from, name);
    return json_is_null(value) ? NULL : value;
}

const char *completion_kind_name(const json_t *value)
{
    static const char *const names[] = {"an object",     "an array", "a string", "an integer",
                                        "a real number", "true",     "false",    "null"};
    return value == NULL ? "nothing" : names[json_typeof(value)];
}

/* ---- numbers and flags: one table ---- */

/* name, field of completion_params_t, default, least, most (both allowed) */
#define REAL_TABLE(X)                                                                              \
    X(temperature, sampling.temperature, 1, 0, 1e6)                                                \
    X(top_p, sampling.top_p, 1, 0, 1)                                                              \
    X(min_p, sampling.min_p, 0, 0, 1)                                                              \
    X(repetition_penalty, sampling.repetition_penalty, 1, 0, 1e6)                                  \
    X(presence_penalty, sampling.presence_penalty, 0, -2, 2)                                       \
    X(frequency_penalty, sampling.frequency_penalty, 0, -2, 2)

#define INTEGER_TABLE(X)                                                                           \
    X(n, n, 1, 1, COMPLETION_MAX_CHOICES)                                                          \
    X(top_k, sampling.top_k, 0, -1, INT32_MAX)                                                     \
    X(min_tokens, sampling.min_tokens, 0, 0, INT32_MAX)

#define FLAG_TABLE(X)                                                                              \
    X(ignore_eos, sampling.ignore_eos, false)                                                      \
    X(skip_special_tokens, skip_special_tokens, true)                                              \
    X(include_stop_str_in_output, include_stop_str_in_output, false)

/* What does not concern sampling: always in the body itself. */
#define CALL_FLAG_TABLE(X)                                                                         \
    X(stream, stream, false)                                                                       \
    X(return_token_ids, return_token_ids, false)                                                   \
    X(return_tokens_as_token_ids, return_tokens_as_token_ids, false)                               \
    X(return_kv_history, return_kv_history, false)                                                 \
    X(return_seed, return_seed, false)                                                             \
    X(add_special_tokens, add_special_tokens, true)

static lk_status_t parse_real(completion_parse_t *p, const char *name, double least, double most,
                              double *out)
{
    const json_t *value = completion_get(p, name);
    if (value == NULL) {
        return LK_OK;
    }
    if (!json_is_number(value)) {
        return REFUSE(p, name, "%s must be a number, not %s", name, completion_kind_name(value));
    }
    double x = json_number_value(value);
    if (!(x >= least && x <= most)) {
        return REFUSE(p, name, "%s must be from %g to %g, not %g", name, least, most, x);
    }
    *out = x;
    return LK_OK;
}

lk_status_t completion_parse_integer(completion_parse_t *p, const char *name, int64_t least,
                                     int64_t most, int64_t *out)
{
    const json_t *value = completion_get(p, name);
    if (value == NULL) {
        return LK_OK;
    }
    if (!json_is_integer(value)) {
        return REFUSE(p, name, "%s must be an integer, not %s", name, completion_kind_name(value));
    }
    int64_t x = json_integer_value(value);
    if (x < least || x > most) {
        return REFUSE(p, name, "%s must be from %" PRId64 " to %" PRId64 ", not %" PRId64, name,
                      least, most, x);
    }
    *out = x;
    return LK_OK;
}

static lk_status_t parse_flag(completion_parse_t *p, const char *name, bool *out)
{
    const json_t *value = completion_get(p, name);
    if (value != NULL) {
        if (!json_is_boolean(value)) {
            return REFUSE(p, name, "%s must be true or false, not %s", name,
                          completion_kind_name(value));
        }
        *out = json_is_true(value);
    }
    return LK_OK;
}

/* Where the fields of sampling stand. */
lk_status_t completion_find_sampling(completion_parse_t *p)
{
    p->from = p->body;
    if (p->kind == COMPLETION_GENERATE) {
        const json_t *sampling = completion_get(p, "sampling_params");
        if (!json_is_object(sampling)) {
            return REFUSE(p, "sampling_params", "sampling_params must be an object, not %s",
                          completion_kind_name(sampling));
        }
        p->from = sampling;
    }
    return LK_OK;
}

static lk_status_t parse_tables(completion_parse_t *p)
{
    LK_RETURN_IF_ERROR(completion_find_sampling(p));
#define X(name, field, def, least, most)                                                           \
    p->out->field = def;                                                                           \
    LK_RETURN_IF_ERROR(parse_real(p, #name, least, most, &p->out->field));
    REAL_TABLE(X)
#undef X
#define X(name, field, def, least, most)                                                           \
    {                                                                                              \
        int64_t x = def;                                                                           \
        LK_RETURN_IF_ERROR(completion_parse_integer(p, #name, least, most, &x));                   \
        p->out->field = x;                                                                         \
    }
    INTEGER_TABLE(X)
#undef X
#define X(name, field, def)                                                                        \
    p->out->field = def;                                                                           \
    LK_RETURN_IF_ERROR(parse_flag(p, #name, &p->out->field));
    FLAG_TABLE(X)
    p->from = p->body;
    CALL_FLAG_TABLE(X)
#undef X
    LK_RETURN_IF_ERROR(
        completion_parse_integer(p, "priority", INT64_MIN, INT64_MAX, &p->out->priority));
    if (p->out->sampling.top_p == 0) {
        return REFUSE(p, "top_p", "top_p must be above 0 (and at most 1)");
    }
    if (p->out->sampling.repetition_penalty == 0) {
        return REFUSE(p, "repetition_penalty", "repetition_penalty must be above 0");
    }
    return LK_OK;
}

/* ---- what others support and this server doesn't ---- */

typedef enum { NEUTRAL_NULL, NEUTRAL_FALSE, NEUTRAL_TRUE, NEUTRAL_EMPTY, NEUTRAL_ONE } neutral_t;
static const struct {
    const char *name;
    neutral_t neutral; /* the value besides null that asks for nothing */
} unsupported[] = {
    {"suffix", NEUTRAL_EMPTY},
    {"structured_outputs", NEUTRAL_NULL},
    {"guided_json", NEUTRAL_NULL},
    {"guided_regex", NEUTRAL_NULL},
    {"guided_choice", NEUTRAL_NULL},
    {"guided_grammar", NEUTRAL_NULL},
    {"response_format", NEUTRAL_NULL},
    {"use_beam_search", NEUTRAL_FALSE},
    {"length_penalty", NEUTRAL_ONE},
    {"truncate_prompt_tokens", NEUTRAL_NULL},
    {"logits_processors", NEUTRAL_EMPTY},
    {"prompt_embeds", NEUTRAL_NULL},
    {"kv_transfer_params", NEUTRAL_NULL},
    {"ec_transfer_params", NEUTRAL_NULL},
    {"features", NEUTRAL_NULL},
    {"content_parts", NEUTRAL_NULL},
    {"token_offsets", NEUTRAL_NULL},
    {"prompt_logprob_token_ids", NEUTRAL_NULL},
    {"vllm_xargs", NEUTRAL_EMPTY},
    {"spaces_between_special_tokens", NEUTRAL_TRUE},
};

static bool is_neutral(const json_t *value, neutral_t neutral)
{
    switch (neutral) {
    case NEUTRAL_NULL:
        return false;
    case NEUTRAL_FALSE:
        return json_is_false(value);
    case NEUTRAL_TRUE:
        return json_is_true(value);
    case NEUTRAL_ONE:
        return json_is_number(value) && json_number_value(value) == 1;
    case NEUTRAL_EMPTY:
        return json_is_string(value)   ? json_string_length(value) == 0
               : json_is_array(value)  ? json_array_size(value) == 0
               : json_is_object(value) ? json_object_size(value) == 0
                                       : false;
    }
    return false;
}

static lk_status_t refuse_those_in(completion_parse_t *p, const json_t *object)
{
    p->from = object;
    for (size_t i = 0; i < LK_ARRAY_LEN(unsupported); i++) {
        const json_t *value = completion_get(p, unsupported[i].name);
        if (value != NULL && !is_neutral(value, unsupported[i].neutral)) {
            const json_t *type = json_object_get(value, "type");
            if (strcmp(unsupported[i].name, "response_format") == 0 && json_is_string(type) &&
                strcmp(json_string_value(type), "text") == 0) {
                continue;
            }
            *p->param = unsupported[i].name;
            return lk_error_set(p->err, LK_ERR_UNSUPPORTED, "%s is not supported",
                                unsupported[i].name);
        }
    }
    return LK_OK;
}

static lk_status_t refuse_unsupported(completion_parse_t *p)
{
    LK_RETURN_IF_ERROR(refuse_those_in(p, p->body));
    LK_RETURN_IF_ERROR(completion_find_sampling(p));
    LK_RETURN_IF_ERROR(refuse_those_in(p, p->from));
    const json_t *best_of = completion_get(p, "best_of");
    if (best_of != NULL &&
        !(json_is_integer(best_of) && (uint64_t)json_integer_value(best_of) == p->out->n)) {
        return REFUSE(p, "best_of", "best_of must equal n");
    }
    return LK_OK;
}

/* ---- stops, limits and the rest ---- */

static lk_status_t parse_stops(completion_parse_t *p)
{
    LK_RETURN_IF_ERROR(completion_find_sampling(p));
    completion_params_t *out = p->out;
    const json_t *value = completion_get(p, "stop");
    if (value != NULL) {
        size_t n = json_is_array(value) ? json_array_size(value) : 1;
        if (n > COMPLETION_MAX_STOPS) {
            return REFUSE(p, "stop", "stop has %zu strings, at most %d are allowed", n,
                          COMPLETION_MAX_STOPS);
        }
        out->stops = calloc(n + 1, sizeof out->stops[0]);
        if (out->stops == NULL) {
            return lk_error_set(p->err, LK_ERR_NO_MEMORY, "out of memory");
        }
        for (size_t i = 0; i < n; i++) {
            const json_t *item = json_is_array(value) ? json_array_get(value, i) : value;
            if (!json_is_string(item) || json_string_length(item) == 0) {
                return REFUSE(p, "stop",
                              "stop must be a string or an array of strings, none empty");
            }
            out->stops[out->n_stops++] = json_string_value(item);
        }
        if (n > 0 && p->limits->tokenizer == NULL) {
            return completion_no_tokenizer(p, "stop");
        }
    }
    const json_t *ids = completion_get(p, "stop_token_ids");
    if (ids != NULL) {
        size_t n = json_array_size(ids);
        if (!json_is_array(ids) || n > COMPLETION_MAX_STOP_IDS) {
            return REFUSE(p, "stop_token_ids", "stop_token_ids must be an array of at most %d ids",
                          COMPLETION_MAX_STOP_IDS);
        }
        out->stop_ids = calloc(n + 1, sizeof out->stop_ids[0]);
        if (out->stop_ids == NULL) {
            return lk_error_set(p->err, LK_ERR_NO_MEMORY, "out of memory");
        }
        LK_RETURN_IF_ERROR(completion_parse_ids(p, "stop_token_ids", ids, out->stop_ids));
        out->sampling.stop_token_ids = (msg_bin_t){out->stop_ids, n * sizeof out->stop_ids[0]};
    }
    return LK_OK;
}

static lk_status_t parse_limits(completion_parse_t *p)
{
    LK_RETURN_IF_ERROR(completion_find_sampling(p));
    completion_params_t *out = p->out;
    const json_t *max_tokens = json_object_get(p->from, "max_tokens");
    /* null asks for all the room */
    int64_t x = max_tokens == NULL && p->kind == COMPLETION_OPENAI ? 16 : 0;
    LK_RETURN_IF_ERROR(completion_parse_integer(p, "max_tokens", out->echo ? 0 : 1, INT32_MAX, &x));
    if (out->echo && x == 0 && json_is_integer(max_tokens)) { /* the prompt alone */
        out->echo_only = true;
        x = 1; /* which nobody gets to see */
    }
    out->sampling.max_tokens = (uint64_t)x;
    if (x != 0 && out->sampling.min_tokens > out->sampling.max_tokens) {
        return REFUSE(p, "min_tokens", "min_tokens is %" PRIu64 ", above max_tokens %" PRId64,
                      out->sampling.min_tokens, x);
    }
    int64_t seed = 0;
    LK_RETURN_IF_ERROR(completion_parse_integer(p, "seed", INT64_MIN, INT64_MAX, &seed));
    out->has_seed = completion_get(p, "seed") != NULL;
    out->sampling.seed = (uint64_t)seed;
    return LK_OK;
}

static lk_status_t parse_others(completion_parse_t *p)
{
    completion_params_t *out = p->out;
    p->from = p->body;
    const json_t *salt = completion_get(p, "cache_salt");
    if (salt != NULL && (!json_is_string(salt) || json_string_length(salt) == 0 ||
                         json_string_length(salt) > COMPLETION_MAX_SALT)) {
        return REFUSE(p, "cache_salt", "cache_salt must be a string of 1 to %d bytes",
                      COMPLETION_MAX_SALT);
    }
    out->cache_salt = json_string_value(salt);
    const json_t *options = completion_get(p, "stream_options");
    if (options != NULL) {
        const json_t *usage = json_object_get(options, "include_usage");
        if (!json_is_object(options) || !(usage == NULL || json_is_boolean(usage))) {
            return REFUSE(p, "stream_options",
                          "stream_options must be an object; include_usage true or false");
        }
        if (!out->stream) {
            return REFUSE(p, "stream_options", "stream_options needs \"stream\": true");
        }
        out->include_usage = json_is_true(usage);
    }
    const json_t *user = completion_get(p, "user");
    if (user != NULL && !json_is_string(user)) {
        return REFUSE(p, "user", "user must be a string, not %s", completion_kind_name(user));
    }
    return LK_OK;
}

/* Bytes that may stand in a header and in JSON as they are. */
static bool id_ok(const char *id)
{
    size_t n = strlen(id);
    bool ok = n > 0 && n <= COMPLETION_MAX_ID;
    for (size_t i = 0; i < n && ok; i++) {
        ok = id[i] > ' ' && id[i] < 127 && id[i] != '"' && id[i] != '\\';
    }
    return ok;
}

/* What only one of the two has. */
static lk_status_t parse_kind(completion_parse_t *p)
{
    completion_params_t *out = p->out;
    out->kind = p->kind;
    bool detokenize = true;
    LK_RETURN_IF_ERROR(completion_find_sampling(p));
    LK_RETURN_IF_ERROR(parse_flag(p, "detokenize", &detokenize));
    p->from = p->body;
    LK_RETURN_IF_ERROR(parse_flag(p, "echo", &out->echo));
    if (p->kind == COMPLETION_OPENAI) {
        out->text = detokenize;
        return detokenize ? LK_OK
                          : REFUSE(p, "detokenize", "detokenize must be true for this path");
    }
    if (out->echo) {
        *p->param = "echo";
        return lk_error_set(p->err, LK_ERR_UNSUPPORTED, "echo is not supported");
    }
    const json_t *id = completion_get(p, "request_id");
    if (id != NULL && (!json_is_string(id) || !id_ok(json_string_value(id)))) {
        return REFUSE(p, "request_id",
                      "request_id must be a string of 1 to %d printable ASCII characters without "
                      "spaces, quotes and backslashes",
                      COMPLETION_MAX_ID);
    }
    out->request_id = json_string_value(id);
    const json_t *mode = completion_get(p, "output_mode");
    const char *name = mode == NULL ? "tokens" : json_string_value(mode);
    if (name == NULL || (strcmp(name, "tokens") != 0 && strcmp(name, "text") != 0)) {
        return REFUSE(p, "output_mode", "output_mode must be \"tokens\" or \"text\"");
    }
    out->text = strcmp(name, "text") == 0;
    if (out->text && !detokenize) {
        return REFUSE(p, "output_mode", "output_mode text needs detokenize, which is false");
    }
    if (out->text && p->limits->tokenizer == NULL) {
        return completion_no_tokenizer(p, "output_mode");
    }
    return LK_OK;
}

static lk_status_t parse_model(completion_parse_t *p)
{
    p->from = p->body;
    const json_t *model = completion_get(p, "model");
    if (model == NULL) {
        return LK_OK;
    }
    if (!json_is_string(model)) {
        return REFUSE(p, "model", "model must be a string, not %s", completion_kind_name(model));
    }
    if (strcmp(json_string_value(model), p->limits->model) != 0) {
        *p->param = "model";
        return lk_error_set(p->err, LK_ERR_NOT_FOUND, "The model `%.256s` does not exist.",
                            json_string_value(model));
    }
    return LK_OK;
}

lk_status_t completion_params_parse(completion_kind_t kind, const json_t *body,
                                    const completion_limits_t *limits, completion_params_t *out,
                                    const char **param, lk_error_t *err)
{
    completion_params_t params = {0};
    completion_parse_t p = {.kind = kind,
                            .body = body,
                            .from = body,
                            .prompt = kind == COMPLETION_GENERATE ? "token_ids" : "prompt",
                            .limits = limits,
                            .out = &params,
                            .param = param,
                            .err = err};
    *param = "";
    lk_status_t (*const steps[])(completion_parse_t *) = {parse_model,
                                                          parse_tables,
                                                          parse_kind,
                                                          parse_limits,
                                                          parse_others,
                                                          completion_parse_logprobs,
                                                          refuse_unsupported,
                                                          parse_stops,
                                                          completion_parse_rules,
                                                          completion_parse_prompt,
                                                          completion_check_logprobs};
    for (size_t i = 0; i < LK_ARRAY_LEN(steps); i++) {
        lk_status_t status = steps[i](&p);
        if (status != LK_OK) {
            completion_params_fini(&params);
            return status;
        }
    }
    *out = params;
    return LK_OK;
}

void completion_params_fini(completion_params_t *self)
{
    if (self == NULL) {
        return;
    }
    for (size_t i = 0; i < self->n_prompts; i++) {
        free(self->prompts[i].ids);
    }
    free(self->prompts);
    free(self->stops);
    free(self->stop_ids);
    free(self->bias_ids);
    free(self->bias_values);
    free(self->allowed_ids);
    free(self->bad_ids);
    *self = (completion_params_t){0};
}

uint64_t completion_params_max_tokens(const completion_params_t *self, size_t prompt,
                                      const completion_limits_t *limits)
{
    return self->sampling.max_tokens != 0 ? self->sampling.max_tokens
                                          : limits->max_model_len - self->prompts[prompt].n;
}
