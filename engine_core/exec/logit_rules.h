/*
 * logit_rules.h: which ids a client allows, forbids or favours: allowed_token_ids, bad_words,
 * logit_bias. A request owns its rules; they change a row of logits before penalties. Pure.
 */
#ifndef LK_ENGINE_CORE_EXEC_LOGIT_RULES_H
#define LK_ENGINE_CORE_EXEC_LOGIT_RULES_H

#include "proto/messages.h"

#include <stdint.h>

#define LOGIT_RULES_MAX_BIASES    1024
#define LOGIT_RULES_MAX_BIAS      100 /* magnitude */
#define LOGIT_RULES_MAX_ALLOWED   (1u << 20)
#define LOGIT_RULES_MAX_BAD_IDS   16384 /* of all bad words together, lengths included */
#define LOGIT_RULES_MAX_BAD_WORDS 256

typedef struct logit_rules logit_rules_t;

/* Reads them from a message. *out is NULL when there are none. LK_ERR_INVALID names the field:
 * sizes that don't fit together, an id outside the vocabulary, a bias that is no number. */
LK_MUST_USE lk_status_t logit_rules_read(const msg_sampling_t *m, uint32_t vocab_size,
                                         logit_rules_t **out, lk_error_t *err);
void logit_rules_destroy(logit_rules_t **self_p); /* accepts NULL */

/* row: [vocab_size]. First all but the allowed ids become -inf; then the last id of each bad word
 * whose other ids the output ends with; then biases are added. output: [n_output]. */
void logit_rules_apply(const logit_rules_t *self, const uint32_t *output, uint32_t n_output,
                       float *row);

#endif
