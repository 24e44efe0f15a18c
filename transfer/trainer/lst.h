/* lst.h: what the files of the trainer's library share. */
#ifndef LK_TRANSFER_TRAINER_LST_H
#define LK_TRANSFER_TRAINER_LST_H

#include "transfer/backends/shm/shm_ring.h"
#include "transfer/backends/transfer_sender.h"
#include "transfer/name_rules.h"
#include "transfer/trainer/lockstep_trainer.h"
#include "transfer/trainer/rpc.h"

struct lst {
    const lk_env_t *env;
    rpc_t *rpc;
    uint64_t timeout_ns, no_progress_ns;
    lk_error_t err;
    char *reply_text; /* of lst_call */

    int listener;    /* -1: none */
    shm_ring_t ring; /* map NULL: tcp */
    transfer_sender_t *sender;
    unsigned n_ranks;
    bool knows_model; /* the two below, from the answer to init */
    lk_dtype_t stored;
    name_rules_dims_t dims;

    lst_stats_t stats;
    uint64_t pause_ns; /* when lst_pause began; 0: not paused by us */
};

/* Sends the call and waits. Takes args (may be NULL). *reply: caller owns; reply may be NULL. */
LK_MUST_USE lk_status_t lst_ask(lst_t *self, const char *call, json_t *args, json_t **reply);
/* Closes what was opened for ranks. */
void lst_drop_ranks(lst_t *self);
/* The descriptions of a caller's tensors, and their data. Caller frees *descs and *data. */
LK_MUST_USE lk_status_t lst_describe(const lst_tensor_t *tensors, size_t n, tensor_desc_t **descs,
                                     const void ***data, lk_error_t *err);

#endif
