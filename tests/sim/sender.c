#include "tests/sim/sender.h"
#include "base/base64.h"
#include "base/buf.h"
#include "base/check.h"
#include "tests/lib/transfer/nccl_fake.h"
#include "tests/sim/checkers.h"
#include "tests/sim/torn_stream.h"
#include "transfer/backends/mem/mem_stream.h"
#include "transfer/backends/nccl/nccl_sender.h"
#include "transfer/backends/transfer_sender.h"
#include "transfer/device/device.h"
#include "transfer/device/device_host.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NCCL_BUFFERS 2

struct sim_sender {
    sim_t *sim;
    char init_info[512];
    bool sending; /* and not canceled */
    /* byte streams */
    mem_listener_t *listener;
    transfer_sender_t *streams; /* NULL: NCCL */
    uint64_t sent;              /* bytes, at the last look */
    /* NCCL */
    device_t *device;
    nccl_sender_t nccl;
    nccl_link_phase_t phase; /* at the last look, like the next */
    size_t done;
};

/* ---- byte streams ---- */

static void open_streams(sim_sender_t *self, const char *name, const char *token, uint32_t n_ranks)
{
    sim_t *sim = self->sim;
    self->listener = mem_listener_new(name, sim->o.ring_bytes);
    self->streams = sender_new(&sim->env, sim->o.transfer_timeout_ms * LK_MS_NS, token, n_ranks, 1);
    CHECK(self->listener != NULL && self->streams != NULL);
    snprintf(self->init_info, sizeof self->init_info,
             "\"trainer\": \"%s\", \"session_token\": \"%s\", \"packed\": true", name, token);
}

static bool look_at_streams(sim_sender_t *self)
{
    sim_t *sim = self->sim;
    byte_stream_t *stream;
    bool moved = false;
    while ((stream = mem_accept(self->listener)) != NULL) {
        if (sim->phase == SIM_SAFETY && sim_chance(sim, sim->o.torn_streams)) {
            stream = torn_stream_new(stream, sim_below(sim, 30000));
        }
        sender_add(self->streams, stream);
        moved = true;
    }
    lk_error_t err = LK_ERROR_INIT;
    if (self->sending) {
        self->sending = sender_step(self->streams, &err) == LK_INPROGRESS;
        moved |= !self->sending;
    } else {
        (void)!sender_greet(self->streams);
    }
    uint64_t sent = sender_bytes(self->streams);
    moved |= sent != self->sent;
    self->sent = sent;
    return moved;
}

/* ---- NCCL ---- */

static void open_nccl(sim_sender_t *self, uint32_t n_ranks)
{
    sim_t *sim = self->sim;
    lk_error_t err = LK_ERROR_INIT;
    uint8_t id[NCCL_ID_BYTES];
    char text[BASE64_SIZE(NCCL_ID_BYTES)];
    sim->env.random(sim->env.ctx, id, sizeof id);
    nccl_fake_know(id);
    base64_encode(id, sizeof id, text);
    lk_status_t status = device_host_open(&self->device, &err);
    if (status == LK_OK) {
        status = nccl_link_open(&self->nccl.link, &nccl_fake_ops, NULL, self->device, &sim->env,
                                sim->o.transfer_timeout_ms * LK_MS_NS, &err);
    }
    CHECKF(status == LK_OK, "%s", err.text);
    nccl_link_start(&self->nccl.link, id, n_ranks + 1, 0);
    snprintf(self->init_info, sizeof self->init_info,
             "\"nccl_unique_id_b64\": \"%s\", \"rank_offset\": 1, \"world_size\": %u, \"packed\": "
             "true, \"packed_buffer_size_bytes\": %u",
             text, n_ranks + 1, SIM_BUCKET_BYTES);
}

static bool look_at_nccl(sim_sender_t *self)
{
    lk_error_t err = LK_ERROR_INIT;
    nccl_link_t *link = &self->nccl.link;
    if (self->sending && sim_plants(self->sim, SIM_CANARY_TORN_BROADCAST)) {
        atomic_store(&nccl_fake_knobs.torn, true);
    }
    if (self->sending) {
        self->sending = nccl_sender_step(&self->nccl, &err) == LK_INPROGRESS;
    } else if (link->phase != NCCL_LINK_DOWN && link->phase != NCCL_LINK_UP) {
        (void)!nccl_link_step(link, &err);
    }
    bool moved = self->phase != link->phase || self->done != self->nccl.done;
    self->phase = link->phase;
    self->done = self->nccl.done;
    return moved;
}

/* The ranks are up: so is this one, when it looks often enough. */
static lk_status_t begin_nccl(sim_sender_t *self, const tensor_desc_t *tensors,
                              const void *const *data, size_t n, lk_error_t *err)
{
    nccl_link_t *link = &self->nccl.link;
    lk_status_t status = LK_INPROGRESS;
    for (int looks = 0; looks < 1000 && status == LK_INPROGRESS; looks++) {
        if (link->phase == NCCL_LINK_DOWN) {
            return lk_error_set(err, LK_ERR_STATE, "the communicator has failed");
        }
        status = nccl_link_step(link, err);
    }
    /* the ranks' answer to the last update may come before this end has seen its end */
    for (int looks = 0; looks < 1000 && status == LK_OK && self->nccl.n_buckets > 0; looks++) {
        lk_status_t sent = nccl_sender_step(&self->nccl, err);
        status = sent < 0 ? sent : LK_OK;
    }
    if (status != LK_OK || self->nccl.n_buckets > 0) {
        return status < 0 ? status : lk_error_set(err, LK_ERR_STATE, "a rank is missing");
    }
    return nccl_sender_begin(&self->nccl, tensors, data, n, true, SIM_BUCKET_BYTES, NCCL_BUFFERS,
                             err);
}

/* ---- either ---- */

sim_sender_t *sim_sender_new(sim_t *sim, const char *name, const char *token, uint32_t n_ranks)
{
    sim_sender_t *self = calloc(1, sizeof *self);
    CHECK(self != NULL);
    self->sim = sim;
    if (sim->o.nccl) {
        open_nccl(self, n_ranks);
    } else {
        open_streams(self, name, token, n_ranks);
    }
    return self;
}

void sim_sender_destroy(sim_sender_t **self_p)
{
    sim_sender_t *self = *self_p;
    if (self == NULL) {
        return;
    }
    *self_p = NULL;
    sender_destroy(&self->streams);
    mem_listener_destroy(&self->listener);
    if (self->device != NULL) {
        nccl_sender_fini(&self->nccl);
        device_close(&self->device);
    }
    free(self);
}

const char *sim_sender_init_info(const sim_sender_t *self)
{
    return self->init_info;
}

bool sim_sender_look(sim_sender_t *self, bool *sending)
{
    self->sending = self->sending && *sending;
    bool was = self->sending;
    bool moved = self->streams != NULL ? look_at_streams(self) : look_at_nccl(self);
    *sending = self->sending;
    return moved || was != self->sending;
}

lk_status_t sim_sender_begin(sim_sender_t *self, const tensor_desc_t *tensors, void *const *data,
                             size_t n, lk_error_t *err)
{
    const void *const *from = (const void *const *)data;
    lk_status_t status = self->streams != NULL ? sender_begin(self->streams, tensors, from, n, true,
                                                              SIM_BUCKET_BYTES, err)
                                               : begin_nccl(self, tensors, from, n, err);
    self->sending = status == LK_OK;
    return status;
}

void sim_sender_cancel(sim_sender_t *self)
{
    if (self->streams != NULL) {
        sender_cancel(self->streams, "the call failed");
    } else {
        nccl_sender_cancel(&self->nccl);
    }
    self->sending = false;
}

bool sim_sender_usable(const sim_sender_t *self)
{
    return self->streams != NULL ? sender_usable(self->streams)
                                 : self->nccl.link.phase == NCCL_LINK_UP;
}

unsigned sim_senders_reset(void)
{
    return nccl_fake_reset();
}
