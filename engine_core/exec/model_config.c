#include "engine_core/exec/model_config.h"

void model_config_dims(const model_config_t *config, name_rules_dims_t *out)
{
    *out = (name_rules_dims_t){
        .num_layers = config->num_layers,
        .num_attention_heads = config->num_heads,
        .num_key_value_heads = config->num_kv_heads,
        .head_dim = config->head_dim,
        .num_experts = config->num_experts,
        .tied = config->tie_word_embeddings,
    };
}
