/* completion_logprobs.c: logprobs and prompt_logprobs of a completion's body. Of
 * completion_params.h. */
#include "api_frontend/completion_parse.h"
#include "base/check.h"
#include "proto/limits.h"

#include <inttypes.h>

/* The most that may be asked for. -1 in a body asks for all, where that is allowed. */
static int64_t most_logprobs(const completion_parse_t *p)
{
    int64_t all = (int64_t)p->limits->vocab_size, most = p->limits->max_logprobs;
    most = most < 0 || most > all ? all : most;
    return LK_MIN(most, (int64_t)(MSG_MAX_BIN / sizeof(uint32_t))); /* one token's fit a message */
}

static lk_status_t parse_count(completion_parse_t *p, const char *name, int64_t *out)
{
    int64_t most = most_logprobs(p), all = (int64_t)p->limits->vocab_size, x = *out;
    const json_t *value = completion_get(p, name);
    if (value == NULL) {
        return LK_OK;
    }
    if (json_is_integer(value) && json_integer_value(value) == -1) {
        if (most < all) {
            return REFUSE(p, name,
                          "%s is -1, which asks for all %" PRId64
                          " tokens of the vocabulary; at most %" PRId64 " are allowed "
                          "(--max-logprobs)",
                          name, all, most);
        }
        x = all;
    } else {
        LK_RETURN_IF_ERROR(completion_parse_integer(p, name, 0, most, &x));
    }
    *out = x;
    return LK_OK;
}

lk_status_t completion_parse_logprobs(completion_parse_t *p)
{
    completion_params_t *out = p->out;
    int64_t of_prompt = -1;
    LK_RETURN_IF_ERROR(completion_find_sampling(p));
    out->sampling.logprobs = -1;
    LK_RETURN_IF_ERROR(parse_count(p, "logprobs", &out->sampling.logprobs));
    LK_RETURN_IF_ERROR(parse_count(p, "prompt_logprobs", &of_prompt));
    out->prompt_logprobs = of_prompt;
    if (of_prompt >= 0 && out->stream) {
        return REFUSE(p, "prompt_logprobs",
                      "`prompt_logprobs` are not available when `stream=True`.");
    }
    if (out->echo) { /* the prompt's tokens are shown like the others */
        of_prompt = LK_MAX(of_prompt, out->sampling.logprobs);
    }
    out->sampling.prompt_logprobs = (uint64_t)(of_prompt + 1);
    return LK_OK;
}

/* What a stream has written is gone, but large numbers of logprobs count as if all were held: they
 * come faster than they are written. */
lk_status_t completion_check_logprobs(completion_parse_t *p)
{
    completion_params_t *out = p->out;
    const double per_token = (double)(out->sampling.logprobs + 1); /* doubles do not overflow */
    const double per_prompt = (double)out->sampling.prompt_logprobs, n = (double)out->n;
    const bool many = LK_MAX(per_token, per_prompt) > 1 + COMPLETION_FEW_LOGPROBS;
    const double most = many ? COMPLETION_MANY_LOGPROBS : COMPLETION_MAX_LOGPROBS;
    double held = 0, scored = 0;
    for (size_t i = 0; i < out->n_prompts; i++) {
        bool gone = out->stream && !many;
        uint64_t tokens = gone ? 1 : completion_params_max_tokens(out, i, p->limits);
        held += n * (double)tokens * per_token;
        scored += (out->stream ? n : 1) * (double)out->prompts[i].n * per_prompt;
    }
    if (held > most || scored > most) {
        const char *name = held > most                 ? "logprobs"
                           : out->prompt_logprobs >= 0 ? "prompt_logprobs"
                                                       : "echo";
        return REFUSE(
            p, name,
            "%s asks for up to %.0f logprobs in one reply, and at most %.0f are possible: "
            "ask for fewer per token or for fewer tokens",
            name, held > most ? held : scored, most);
    }
    out->reserved_logprobs = many ? (uint64_t)(held + scored) : 0;
    return LK_OK;
}
