/*
 * tokenizer_load.h: the sections of tokenizer.json, one function each. They fill a tokenizer_t
 * that the caller destroys on any error. Private to this folder.
 */
#ifndef LK_TOKENIZER_LOAD_H
#define LK_TOKENIZER_LOAD_H

#include "api_frontend/tokenizer/json_in.h"
#include "api_frontend/tokenizer/tokenizer_parts.h"

#define TOKENIZER_MAX_MERGES (1u << 20)

lk_status_t tokenizer_load_model(tokenizer_t *t, json_t *root, lk_error_t *err);
lk_status_t tokenizer_load_normalizer(tokenizer_t *t, json_t *root, lk_error_t *err);
lk_status_t tokenizer_load_pretokenizer(tokenizer_t *t, json_t *root, lk_error_t *err);
lk_status_t tokenizer_load_decoder(json_t *root, lk_error_t *err);
lk_status_t tokenizer_load_post_processor(tokenizer_t *t, json_t *root, lk_error_t *err);

/* After the model and the normalizer. config (tokenizer_config.json) may be NULL; the flags it has
 * for the same tokens win. Then its further tokens. */
lk_status_t tokenizer_load_added(tokenizer_t *t, json_t *root, json_t *config, lk_error_t *err);
lk_status_t tokenizer_load_config_added(tokenizer_t *t, json_t *config, lk_error_t *err);

/* Last: names of bos and eos, and the settings that override tokenizer.json's. */
lk_status_t tokenizer_load_config(tokenizer_t *t, json_t *config, lk_error_t *err);

#endif
