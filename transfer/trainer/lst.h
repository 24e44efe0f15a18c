/* lst.h: what the files of the trainer's library share. */
#ifndef LK_TRANSFER_TRAINER_LST_H
#define LK_TRANSFER_TRAINER_LST_H

#include "base/buf.h"
#include "transfer/backends/nccl/nccl_comm.h"
#include "transfer/backends/shm/shm_ring.h"
#include "transfer/backends/transfer_sender.h"
#include "transfer/name_rules.h"
#include "transfer/trainer/lockstep_trainer.h"
#include "transfer/trainer/rpc.h"

typedef struct lst_nccl lst_nccl_t;

struct lst {
    const lk_env_t *env;
    rpc_t *rpc;
    uint64_t timeout_ns, no_progress_ns;
    lk_error_t err;
    char *reply_text;     /* of lst_call and lst_update_reply */
    json_t *update_reply; /* to the last update_weights; NULL: none */
    lk_buf_t object_text; /* of the last arguments that were seen to be a JSON object */

    int listener;    /* -1: none */
    shm_ring_t ring; /* map NULL: tcp */
    transfer_sender_t *sender;
    lst_nccl_t *nccl;     /* NULL: never used */
    device_t *ipc_device; /* of the tensors, once lst_init_ipc was called */
    bool ipc_borrowed, ipc_up;
    unsigned n_ranks;
    bool knows_model; /* the two below, from the answer to init */
    lk_dtype_t stored;
    bool digests; /* the ranks make them; likewise */
    name_rules_dims_t dims;

    lst_stats_t stats;
    uint64_t pause_ns; /* when lst_pause began; 0: not paused by us */
};

/* Sends the call and waits. Takes args (may be NULL). *reply: caller owns; reply may be NULL. */
LK_MUST_USE lk_status_t lst_ask(lst_t *self, const char *call, json_t *args, json_t **reply);
/* How many ranks there are, before an init: lst_world_size, asked again while the group of engines
 * is being formed anew, for as long as a transfer may make no progress. */
lst_status_t lst_count_ranks(lst_t *self);
/* Closes what was opened for ranks. */
void lst_drop_ranks(lst_t *self);
/* The descriptions of a caller's tensors, and their data. Caller frees *descs and *data. */
LK_MUST_USE lk_status_t lst_describe(const lst_tensor_t *tensors, size_t n, tensor_desc_t **descs,
                                     const void ***data, lk_error_t *err);

/* From the answer to init: what lst_digest needs. Older front ends leave it out. */
void lst_learn_model(lst_t *self, const json_t *reply);
/* The transfer broke; the ranks notice too, and the cluster's answer may know better why. */
LK_MUST_USE lk_status_t lst_ask_for_the_reason(lst_t *self, const lk_error_t *sent);
/* Takes the answer to an update_weights, for lst_update_reply. */
void lst_keep_reply(lst_t *self, json_t *reply);
/* The body of update_weights, which the caller frees; NULL if a name is not UTF-8, or out of
 * memory. */
char *lst_update_args(const tensor_desc_t *descs, size_t n, bool packed, uint64_t buffer_size);

/* ---- NCCL (lst_nccl.c) ---- */

bool lst_nccl_up(const lst_t *self);
/* Where the tensors of updates over NCCL lie; NULL: it is not up. */
device_t *lst_nccl_device(const lst_t *self);
/* buffer_size 0: what suits the tensors. */
LK_MUST_USE lk_status_t lst_nccl_update(lst_t *self, const tensor_desc_t *descs,
                                        const void *const *data, size_t n, bool packed,
                                        uint64_t buffer_size, uint64_t *bytes);
/* Ends the communicator; keeps the device. */
void lst_nccl_drop(lst_t *self);
void lst_nccl_fini(lst_t *self);
/* Other communicators and another device (borrowed) from now on, for tests. */
LK_MUST_USE lk_status_t lst_nccl_use(lst_t *self, const nccl_comm_ops_t *ops, device_t *device);

/* ---- CUDA IPC (lst_ipc.c) ---- */

/* Ends the connection; keeps the device. */
void lst_ipc_drop(lst_t *self);
void lst_ipc_fini(lst_t *self);
/* Another device (borrowed) from now on, for tests. */
void lst_ipc_use(lst_t *self, device_t *device);

#endif
