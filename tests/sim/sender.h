/*
 * sender.h: a trainer's connection with the ranks, whatever carries it: the product's byte streams
 * over memory, or its NCCL sender over communicators that block as NCCL's do.
 */
#ifndef LK_TESTS_SIM_SENDER_H
#define LK_TESTS_SIM_SENDER_H

#include "tests/sim/sim.h"
#include "transfer/tensor_desc.h"

#define SIM_BUCKET_BYTES 700u /* packed_buffer_size_bytes of all updates */

typedef struct sim_sender sim_sender_t;

/* Ready to meet so many ranks. name and token tell it from all others of the run. */
sim_sender_t *sim_sender_new(sim_t *sim, const char *name, const char *token, uint32_t n_ranks);
/* As a process that dies; accepts NULL. */
void sim_sender_destroy(sim_sender_t **self_p);

/* The fields of its init_info. */
const char *sim_sender_init_info(const sim_sender_t *self);
/* Meets and sends; true if anything moved. *sending: an update is under way, before and after. */
bool sim_sender_look(sim_sender_t *self, bool *sending);
/* Tensors and data stay until it is sent, or canceled. */
LK_MUST_USE lk_status_t sim_sender_begin(sim_sender_t *self, const tensor_desc_t *tensors,
                                         void *const *data, size_t n, lk_error_t *err);
void sim_sender_cancel(sim_sender_t *self);
/* Could begin an update. */
bool sim_sender_usable(const sim_sender_t *self);

/* All communicators of the run have ended; returns how many have not. */
unsigned sim_senders_reset(void);

#endif
