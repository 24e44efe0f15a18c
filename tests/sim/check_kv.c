/*
 * check_kv.c: a second book of every rank's KV memory, written from the batches alone: which token,
 * in which context, each slot holds. What a sequence reads through its block table has to be its
 * own context, and nobody else may read a block that a sequence writes in this step. Nothing is
 * read that was written before a pause with clear_cache, or (unless somebody has paused without)
 * before the weights in force came.
 */
#include "tests/sim/checkers.h"
#include "base/check.h"
#include "tests/sim/net.h"

#include <stdlib.h>
#include <string.h>

typedef struct {
    uint64_t context; /* of all tokens up to this one */
    uint32_t token;
    uint64_t epoch; /* of the weights that computed it */
    bool written;
} slot_t;

typedef struct {
    slot_t *slots;     /* [blocks * block_size] */
    uint32_t *touched; /* [blocks]: 1 + sequence of this step that has it in its table */
    uint32_t *writer;  /* [blocks]: 1 + sequence that writes it */
    size_t n_blocks;
} book_t;

/* A pause with clear_cache. */
typedef struct {
    uint32_t front;
    uint64_t generation, number;
    bool *done; /* [ranks] */
} clear_t;

typedef struct {
    book_t *books; /* [ranks] */
    clear_t *clears;
    size_t n_clears, cap_clears;
    bool may_mix; /* somebody has asked for a pause that keeps the KV */
} state_t;

static uint64_t next_context(uint64_t context, uint32_t token)
{
    return (context ^ token) * 0x100000001b3ull + 0x9E3779B97F4A7C15ull;
}

static book_t *book_of(sim_t *sim, state_t *self, uint32_t rank)
{
    if (self->books == NULL) {
        self->books = calloc(sim->o.ranks, sizeof *self->books);
        CHECK(self->books != NULL);
    }
    book_t *book = &self->books[rank];
    if (book->slots == NULL) {
        book->n_blocks = sim->o.positions / sim->o.block_size;
        book->slots = calloc(book->n_blocks * sim->o.block_size, sizeof *book->slots);
        book->touched = calloc(book->n_blocks, sizeof *book->touched);
        book->writer = calloc(book->n_blocks, sizeof *book->writer);
        CHECK(book->slots != NULL && book->touched != NULL && book->writer != NULL);
    }
    return book;
}

static void forget(state_t *self, uint32_t rank)
{
    if (self->books != NULL) {
        book_t *book = &self->books[rank];
        free(book->slots);
        free(book->touched);
        free(book->writer);
        *book = (book_t){0};
    }
}

/* Blocks that a sequence of the step writes are in no other's table. */
static void check_sharing(sim_t *sim, book_t *book, uint32_t rank, const exec_batch_t *batch)
{
    uint32_t size = (uint32_t)sim->o.block_size;
    memset(book->touched, 0, book->n_blocks * sizeof *book->touched);
    memset(book->writer, 0, book->n_blocks * sizeof *book->writer);
    for (uint32_t s = 0; s < batch->n_seqs; s++) {
        const exec_seq_t *seq = &batch->seqs[s];
        uint32_t n = (seq->start + seq->n + size - 1) / size;
        for (uint32_t b = 0; b < n; b++) {
            uint32_t block = seq->blocks[b];
            bool writes = b >= seq->start / size;
            if (block >= book->n_blocks) {
                sim_fail(sim, "kv", "rank %u, step %llu: block %u of %zu", rank,
                         (unsigned long long)batch->step, block, book->n_blocks);
                return;
            }
            if ((writes && book->touched[block] != 0) || book->writer[block] != 0) {
                sim_fail(sim, "kv",
                         "rank %u, step %llu: a sequence writes to block %u, which another one "
                         "has, too",
                         rank, (unsigned long long)batch->step, block);
                return;
            }
            book->touched[block] = 1 + s;
            book->writer[block] = writes ? 1 + s : 0;
        }
    }
}

static void check_seq(sim_t *sim, const state_t *self, uint32_t rank, const exec_batch_t *batch,
                      const exec_seq_t *seq)
{
    book_t *book = &self->books[rank];
    uint64_t epoch = group_weights(engine_core_group(sim->ranks[rank].core))->epoch;
    uint32_t size = (uint32_t)sim->o.block_size;
    uint64_t context = 0;
    for (uint32_t p = 0; p < seq->start + seq->n; p++) {
        slot_t *slot = &book->slots[(size_t)seq->blocks[p / size] * size + p % size];
        context = next_context(context, seq->tokens[p]);
        if (p >= seq->start) {
            *slot = (slot_t){context, seq->tokens[p], epoch, true};
        } else if (!slot->written || slot->context != context || slot->token != seq->tokens[p]) {
            sim_fail(sim, "kv",
                     "rank %u, step %llu: position %u of a sequence lies in block %u, which holds "
                     "something else",
                     rank, (unsigned long long)batch->step, p, seq->blocks[p / size]);
            return;
        } else if (slot->epoch != epoch && !self->may_mix && !sim->config.frontend_pause) {
            sim_fail(sim, "kv", "rank %u, step %llu: KV of epoch %llu is read in epoch %llu", rank,
                     (unsigned long long)batch->step, (unsigned long long)slot->epoch,
                     (unsigned long long)epoch);
            return;
        }
    }
}

static void on_step(sim_t *sim, state_t *self, uint32_t rank, const exec_batch_t *batch)
{
    book_t *book = book_of(sim, self, rank);
    check_sharing(sim, book, rank, batch);
    for (size_t i = 0; i < batch->n_seqs && !sim->result.failed; i++) {
        check_seq(sim, self, rank, batch, &batch->seqs[i]);
    }
}

static clear_t *find(state_t *self, uint32_t front, uint64_t generation, uint64_t number)
{
    for (size_t i = self->n_clears; i-- > 0;) {
        clear_t *c = &self->clears[i];
        if (c->front == front && c->generation == generation && c->number == number) {
            return c;
        }
    }
    return NULL;
}

static void on_cmd(sim_t *sim, state_t *self, const msg_cmd_t *cmd)
{
    if (cmd->kind != CMD_PAUSE) {
        return;
    }
    self->may_mix |= !cmd->clear_cache;
    if (!cmd->clear_cache ||
        find(self, (uint32_t)cmd->client, cmd->generation, cmd->number) != NULL) {
        return;
    }
    if (self->n_clears == self->cap_clears) {
        self->cap_clears = 2 * self->cap_clears + 32;
        self->clears = realloc(self->clears, self->cap_clears * sizeof *self->clears);
        CHECK(self->clears != NULL);
    }
    clear_t *c = &self->clears[self->n_clears++];
    *c = (clear_t){(uint32_t)cmd->client, cmd->generation, cmd->number,
                   calloc(sim->o.ranks, sizeof *c->done)};
    CHECK(c->done != NULL);
}

static void on_done(sim_t *sim, state_t *self, uint32_t front, const msg_done_t *done)
{
    clear_t *c = find(self, front, done->generation, done->number);
    if (c == NULL || done->rank >= sim->o.ranks || c->done[done->rank]) {
        return;
    }
    c->done[done->rank] = true;
    if (done->status == LK_OK) {
        forget(self, (uint32_t)done->rank);
    }
}

static void saw(sim_t *sim, void *state, const sim_saw_t *saw)
{
    state_t *self = state;
    if (saw->kind == SIM_SAW_STEP_POST) {
        on_step(sim, self, saw->rank, saw->batch);
    } else if (saw->kind == SIM_SAW_RANK_UP) {
        forget(self, saw->rank);
    } else if (saw->kind == SIM_SAW_SENT && !sim->config.frontend_pause) {
        if (saw->msg->type == MSG_CMD) {
            on_cmd(sim, self, &saw->msg->cmd);
        } else if (saw->msg->type == MSG_DONE) {
            on_done(sim, self, saw->to - sim_node_front(sim, 0), &saw->msg->done);
        }
    }
}

static void fini(sim_t *sim, void *state)
{
    state_t *self = state;
    for (uint32_t r = 0; self->books != NULL && r < sim->o.ranks; r++) {
        forget(self, r);
    }
    free(self->books);
    for (size_t i = 0; i < self->n_clears; i++) {
        free(self->clears[i].done);
    }
    free(self->clears);
}

const sim_checker_t check_kv = {
    .name = "kv", .any_design = true, .state_size = sizeof(state_t), .saw = saw, .fini = fini};
