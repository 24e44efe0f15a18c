/*
 * wte_rig.h: one trainer's listener and up to RIG_RANKS receiving engines of one kind, on a clock
 * that moves only when told. The trainer's side is a transfer_sender, or bytes written by hand.
 */
#ifndef LK_TESTS_WTE_RIG_H
#define LK_TESTS_WTE_RIG_H

#include "base/buf.h"
#include "base/prng.h"
#include "tests/lib/transfer/mem_sink.h"
#include "transfer/backends/mem/mem_stream.h"
#include "transfer/backends/shm/shm_ring.h"
#include "transfer/backends/transfer_frame.h"
#include "transfer/backends/transfer_sender.h"
#include "transfer/weight_transfer_engine.h"

#define ck_ok_text(expr, error) ck_assert_msg((expr) == LK_OK, "%s", (error).text)

#define RIG_RANKS    3
#define RIG_TOKEN    "correct horse battery staple"
#define RIG_LIMIT_NS (30 * LK_SECOND_NS)

typedef struct {
    const wte_ops_t *ops;
    bool tcp, shm; /* neither: mem */
    uint32_t n_ranks, lanes;
    lk_env_t env;
    uint64_t now_ns;
    lk_prng_t prng;

    int listener;
    uint16_t port;
    mem_listener_t *mem;
    char segment[32];
    shm_ring_t ring;
    transfer_sender_t *sender;

    wte_context_t ctx[RIG_RANKS];
    void *state[RIG_RANKS];
    mem_sink_t *sink[RIG_RANKS];
} wte_rig_t;

/* A set of tensors with their bytes. */
typedef struct {
    tensor_desc_t descs[MEM_SINK_MAX];
    char names[MEM_SINK_MAX][32];
    void *data[MEM_SINK_MAX];
    size_t n;
} rig_tensors_t;

void rig_tensors_add(rig_tensors_t *self, lk_dtype_t dtype, uint64_t n, lk_prng_t *prng);
void rig_tensors_fini(rig_tensors_t *self);

#define RIG_SLOTS 8u /* of the ring: enough for a script of a small model */

/* Opens a listener and zeroed engines. `capacity` is of mem streams. */
void rig_init(wte_rig_t *self, const char *backend, uint32_t n_ranks, uint32_t lanes,
              size_t capacity, const rig_tensors_t *model);
void rig_fini(wte_rig_t *self);
/* The trainer is gone: listener and connections close; and a fresh one at the same place. */
void rig_trainer_dies(wte_rig_t *self);
void rig_trainer_starts(wte_rig_t *self);

/* Caller decrefs. */
json_t *rig_init_info(const wte_rig_t *self, const char *token);
void rig_post_init(wte_rig_t *self, uint32_t rank);
/* A connection to the listener that is no rank's. */
byte_stream_t *rig_dial(const wte_rig_t *self);
/* One waiting connection, or NULL. */
byte_stream_t *rig_accept(wte_rig_t *self);
/* Waits for one while stepping rank's init. */
byte_stream_t *rig_accept_from(wte_rig_t *self, uint32_t rank);
/* The whole initialisation with the sender. */
void rig_connect(wte_rig_t *self);

wte_update_t rig_update(const rig_tensors_t *tensors, bool packed, uint64_t buffer);
/* Posts to every rank and to the sender. */
void rig_begin(wte_rig_t *self, const rig_tensors_t *tensors, const wte_update_t *update);
/* Steps all until every side is done. */
void rig_run(wte_rig_t *self);
/* Steps rank until it is no longer in progress. */
lk_status_t rig_finish_rank(wte_rig_t *self, uint32_t rank, lk_error_t *err);
void rig_expect_equal(const wte_rig_t *self, uint32_t rank, const rig_tensors_t *tensors);

/* ---- a trainer by hand, over one accepted stream ---- */
/* Writes all of it, stepping the rank meanwhile; false if the rank closed. */
bool rig_write(wte_rig_t *self, byte_stream_t *stream, const void *bytes, size_t len);
/* Reads exactly len bytes, stepping rank's call meanwhile. */
void rig_read(wte_rig_t *self, byte_stream_t *stream, void *out, size_t len);
/* Takes the hello and welcomes it with `session`. The rank's init is then OK. */
void rig_welcome(wte_rig_t *self, byte_stream_t *stream, uint64_t session);
void rig_frame(lk_buf_t *out, transfer_frame_t frame);
/* All that a trainer sends for one update over one lane. With shm the payloads go to the ring. */
void rig_script(wte_rig_t *self, lk_buf_t *out, uint64_t session, uint64_t update,
                const rig_tensors_t *tensors, const wte_update_t *spec);

#endif
