/*
 * demo_weights.h: the weight sets that the demo's trainer pushes and that its checker regenerates.
 * Set 0 is the checkpoint. Set k > 0 is a function of k: fresh random weights for a made-up model,
 * or the checkpoint with every weight scaled by up to +-2 % (`perturb`) for a real one.
 */
#ifndef LK_EXAMPLES_DEMO_DEMO_WEIGHTS_H
#define LK_EXAMPLES_DEMO_DEMO_WEIGHTS_H

#include "engine_core/exec/model_config.h"

typedef struct demo_weights demo_weights_t;

LK_MUST_USE lk_status_t demo_weights_open(const char *model_dir, bool perturb, demo_weights_t **out,
                                          lk_error_t *err);
void demo_weights_close(demo_weights_t **self_p);
const model_config_t *demo_weights_config(const demo_weights_t *self);
size_t demo_weights_count(const demo_weights_t *self);
/* All in bfloat16, canonical names. Valid as long as the object. */
const tensor_desc_t *demo_weights_descs(const demo_weights_t *self);
/* Bytes of one whole set. */
uint64_t demo_weights_bytes(const demo_weights_t *self);
/* Writes tensor i of set k to out (numel bfloat16 values). k > 0. */
LK_MUST_USE lk_status_t demo_weights_tensor(const demo_weights_t *self, size_t i, uint64_t k,
                                            void *out, lk_error_t *err);

#endif
