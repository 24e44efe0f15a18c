#include "tests/sim/transfer.h"
#include "base/check.h"
#include "tests/sim/checkers.h"
#include "tests/lib/transfer/nccl_fake.h"
#include "transfer/backends/backends.h"
#include "transfer/backends/nccl/wte_nccl.h"
#include "transfer/backends/transfer_receiver.h"

#include <stdio.h>
#include <string.h>

/* NCCL itself is the product's (wte_nccl). The collective twin wraps wte_mem. Ranks belong together
 * if they connected with one token. */
typedef struct {
    const lk_env_t *env; /* first: of this rank */
    sim_rank_t *rank;
    char token[64];
    uint32_t world;   /* ranks of the group when it connected */
    uint64_t entered; /* updates of this connection */
    bool in_update, received;
    uint64_t entered_ns, no_progress_ns;
    transfer_receiver_t inner;
} collective_t;

static sim_rank_t *rank_of(const wte_context_t *ctx)
{
    return (sim_rank_t *)((char *)ctx->env - offsetof(sim_rank_t, env));
}

static lk_status_t c_init_check(const json_t *init_info, const wte_context_t *ctx, lk_error_t *err)
{
    return wte_mem.init_check(init_info, ctx, err);
}

static lk_status_t c_init_post(void *state, const json_t *init_info, const wte_context_t *ctx,
                               lk_error_t *err)
{
    collective_t *self = state;
    LK_RETURN_IF_ERROR(wte_mem.init_post(&self->inner, init_info, ctx, err));
    self->env = ctx->env;
    self->rank = rank_of(ctx);
    self->rank->transfer = self;
    self->no_progress_ns = ctx->no_progress_ns;
    self->world = ctx->dp_size;
    self->entered = 0;
    self->in_update = false;
    snprintf(self->token, sizeof self->token, "%s",
             json_string_value(json_object_get(init_info, "session_token")));
    return LK_OK;
}

static lk_status_t c_init_test(void *state, lk_error_t *err)
{
    return wte_mem.init_test(&((collective_t *)state)->inner, err);
}

static lk_status_t c_update_check(void *state, const wte_update_t *update, lk_error_t *err)
{
    return wte_mem.update_check(&((collective_t *)state)->inner, update, err);
}

static lk_status_t c_update_post(void *state, const wte_update_t *update, const weight_sink_t *sink,
                                 lk_error_t *err)
{
    collective_t *self = state;
    LK_RETURN_IF_ERROR(wte_mem.update_post(&self->inner, update, sink, err));
    self->entered++;
    self->in_update = true;
    self->received = false;
    self->entered_ns = self->rank->sim->now_ns;
    sim_saw(self->rank->sim,
            &(sim_saw_t){.kind = SIM_SAW_TRANSFER, .rank = self->rank->rank, .n = self->entered});
    return LK_OK;
}

static bool is_missing(const collective_t *self, const sim_rank_t *peer)
{
    const collective_t *other = peer->transfer;
    const sim_t *sim = self->rank->sim;
    bool stranger = sim->removed[peer->rank] && self->world <= sim->n_members;
    return peer != self->rank && !stranger &&
           (other == NULL || strcmp(other->token, self->token) != 0 ||
            other->entered < self->entered);
}

static void list_missing(const collective_t *self, char *out, size_t room)
{
    const sim_t *sim = self->rank->sim;
    size_t n = 0;
    out[0] = '\0';
    for (uint32_t r = 0; r < sim->o.ranks && n < room; r++) {
        if (is_missing(self, &sim->ranks[r])) {
            n += (size_t)snprintf(out + n, room - n, "%s%u", n > 0 ? ", " : "", r);
        }
    }
}

static lk_status_t c_update_test(void *state, lk_error_t *err)
{
    collective_t *self = state;
    if (!self->received) {
        lk_status_t status = wte_mem.update_test(&self->inner, err);
        self->in_update = status == LK_INPROGRESS || status == LK_OK;
        self->received = status == LK_OK;
        if (status != LK_OK) {
            return status;
        }
    }
    char missing[96];
    list_missing(self, missing, sizeof missing);
    if (missing[0] == '\0') {
        self->in_update = false;
        return LK_OK;
    }
    if (self->rank->sim->now_ns - self->entered_ns >= self->no_progress_ns) {
        self->in_update = false;
        return lk_error_set(err, LK_ERR_TIMEOUT, "rank %s did not enter the broadcast", missing);
    }
    return LK_INPROGRESS;
}

static void c_abort(void *state)
{
    collective_t *self = state;
    self->in_update = self->received = false;
    wte_mem.abort(&self->inner);
}

static void c_progress(const void *state, wte_progress_t *out)
{
    wte_mem.progress(&((const collective_t *)state)->inner, out);
}

static size_t c_pollfds(const void *state, struct pollfd *fds, size_t room)
{
    return 0;
}

static void c_fini(void *state)
{
    collective_t *self = state;
    if (self->rank != NULL && self->rank->transfer == self) {
        self->rank->transfer = NULL;
    }
    wte_mem.fini(&self->inner);
}

static const wte_ops_t collective = {
    .abi_version = WTE_ABI_VERSION,
    .name = "collective",
    .state_size = sizeof(collective_t),
    .init_check = c_init_check,
    .init_post = c_init_post,
    .init_test = c_init_test,
    .update_check = c_update_check,
    .update_post = c_update_post,
    .update_test = c_update_test,
    .abort = c_abort,
    .progress = c_progress,
    .pollfds = c_pollfds,
    .fini = c_fini,
};

const wte_ops_t *sim_transfer_ops(const sim_t *sim)
{
    static const wte_ops_t *const backends[] = {NULL, &wte_mem, &collective};
    if (sim->o.nccl) {
        wte_nccl_use(&nccl_fake_ops);
        return &wte_nccl;
    }
    return backends[sim->o.backend];
}

void sim_transfer_describe(const sim_t *sim, uint32_t rank, char *out, size_t room)
{
    const sim_rank_t *self = &sim->ranks[rank];
    const collective_t *transfer = self->transfer;
    out[0] = '\0';
    if (transfer != NULL && transfer->in_update) {
        char missing[96];
        list_missing(transfer, missing, sizeof missing);
        snprintf(out, room, "sits in the weight broadcast and waits for %s%s",
                 missing[0] != '\0' ? "rank " : "the trainer", missing);
    } else if (self->core != NULL && group_updating(engine_core_group(self->core))) {
        snprintf(out, room, "carries out a weight call");
    }
}
