/*
 * check_weights.c: an epoch's weights are the same on every rank, from its first step to its last,
 * and they are the trainer's: recomputed here from the numbers in a rank's memory and from those
 * that the trainer sent, by the formula of transfer/digest.h written down again.
 */
#include "tests/sim/checkers.h"
#include "base/check.h"
#include "base/hash.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define VERSIONS 4096
#define STEPS    8 /* ranks of a group are at most one step apart */

typedef struct {
    digest_t *tensors; /* [n]: of the committed set, as the trainers' answers tell */
    digest_t *pending; /* of the open session */
    bool *sent;        /* [n]: by the open session */
    bool sure;         /* no answer is missing since the last whole set */
    size_t n;
} book_t;

typedef struct {
    uint64_t step, epoch;
    bool used;
} step_t;

typedef struct {
    bool known[VERSIONS];
    digest_t versions[VERSIONS];
    uint64_t *looked_at; /* [ranks]: 1 + epoch whose numbers were recomputed last */
    digest_t *posted;    /* [ranks]: digest when the step under way was posted */
    step_t steps[STEPS]; /* of a lockstep group */
    book_t book;
} state_t;

static uint64_t mix(uint64_t x)
{
    x += 0x9E3779B97F4A7C15ull;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

static digest_t digest_of(const float *data, uint64_t n)
{
    static const uint64_t lanes[2] = {0x6c6f636b73746570ull, 0x7765696768747321ull};
    digest_t sum = {{0, 0}};
    for (uint64_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, &data[i], sizeof bits);
        for (int l = 0; l < 2; l++) {
            sum.lane[l] += mix(mix(i + lanes[l]) ^ bits);
        }
    }
    return sum;
}

static digest_t digest_of_set(const digest_t *tensors, const tensor_desc_t *descs, size_t n)
{
    digest_t sum = {{0, 0}};
    for (size_t i = 0; i < n; i++) {
        for (uint64_t l = 0; l < 2; l++) {
            uint64_t name = lk_hash64(descs[i].name, strlen(descs[i].name), l);
            sum.lane[l] += mix(mix(name) ^ tensors[i].lane[l]);
        }
    }
    return sum;
}

static bool same(digest_t a, digest_t b)
{
    return a.lane[0] == b.lane[0] && a.lane[1] == b.lane[1];
}

/* ---- what the ranks hold ---- */

static const weight_table_t *table_of(const sim_t *sim, uint32_t rank)
{
    executor_t *executor = sim->ranks[rank].executor;
    return executor->ops->weights(executor);
}

/* The digests that a rank claims are those of the numbers in its memory. */
static void check_memory(sim_t *sim, uint32_t rank)
{
    const weight_table_t *table = table_of(sim, rank);
    for (size_t i = 0; i < weight_table_count(table); i++) {
        const weight_slot_t *slot = weight_table_at(table, i);
        if (slot->data != NULL && !same(slot->digest, digest_of(slot->data, slot->numel))) {
            sim_fail(sim, "weights", "rank %u: the digest of %s is not that of its memory", rank,
                     slot->name);
            return;
        }
    }
}

static void check_version(sim_t *sim, state_t *self, uint32_t rank, uint64_t epoch, digest_t digest)
{
    if (epoch >= VERSIONS) {
        return;
    }
    if (!self->known[epoch]) {
        self->known[epoch] = true;
        self->versions[epoch] = digest;
    } else if (!same(self->versions[epoch], digest)) {
        sim_fail(sim, "weights", "rank %u steps with other weights than those of epoch %llu", rank,
                 (unsigned long long)epoch);
    }
}

static void check_step(sim_t *sim, state_t *self, uint64_t step, uint64_t epoch)
{
    step_t *s = &self->steps[step % STEPS];
    if (!s->used || s->step != step) {
        *s = (step_t){step, epoch, true};
    } else if (s->epoch != epoch) {
        sim_fail(sim, "weights", "step %llu is taken with epochs %llu and %llu",
                 (unsigned long long)step, (unsigned long long)s->epoch, (unsigned long long)epoch);
    }
}

static void on_post(sim_t *sim, state_t *self, uint32_t rank, const exec_batch_t *batch)
{
    const weight_state_t *weights = group_weights(engine_core_group(sim->ranks[rank].core));
    digest_t digest = weight_table_digest(table_of(sim, rank));
    self->posted[rank] = digest;
    check_version(sim, self, rank, weights->epoch, digest);
    if (sim->o.moe && sim->o.ranks > 1) {
        check_step(sim, self, batch->step, weights->epoch);
    }
    if (self->looked_at[rank] != 1 + weights->epoch) {
        self->looked_at[rank] = 1 + weights->epoch;
        check_memory(sim, rank);
    }
}

static void on_done(sim_t *sim, state_t *self, uint32_t rank)
{
    if (!same(self->posted[rank], weight_table_digest(table_of(sim, rank)))) {
        sim_fail(sim, "weights", "rank %u: the weights changed under a step", rank);
    }
}

/* ---- what the trainers sent ---- */

static void open_book(book_t *book, const sim_sent_t *sent)
{
    if (book->tensors == NULL) {
        book->n = sent->n_tensors;
        book->tensors = calloc(book->n, sizeof *book->tensors);
        book->pending = calloc(book->n, sizeof *book->pending);
        book->sent = calloc(book->n, sizeof *book->sent);
        CHECK(book->tensors != NULL && book->pending != NULL && book->sent != NULL);
    }
}

static void on_start(book_t *book)
{
    if (book->sent != NULL) {
        memset(book->sent, 0, book->n * sizeof *book->sent);
    }
}

static void on_update(book_t *book, const sim_sent_t *sent)
{
    open_book(book, sent);
    for (size_t i = sent->first; i < sent->first + sent->n; i++) {
        uint64_t numel = 0;
        CHECK(tensor_desc_numel(&sent->descs[i], &numel));
        book->pending[i] = digest_of(sent->data[i], numel);
        book->sent[i] = true;
    }
}

static void on_finish(sim_t *sim, book_t *book, const sim_saw_t *saw)
{
    sim_sent_t sent = sim_trainer_sent(saw->call);
    open_book(book, &sent);
    bool whole = true;
    for (size_t i = 0; i < book->n; i++) {
        whole &= book->sent[i];
        if (book->sent[i]) {
            book->tensors[i] = book->pending[i];
        }
        book->sent[i] = false;
    }
    book->sure |= whole;
    if (!book->sure) {
        return; /* the first set of all is not the trainer's */
    }
    digest_t set = digest_of_set(book->tensors, sent.descs, book->n);
    char want[40];
    snprintf(want, sizeof want, "%016llx%016llx", (unsigned long long)set.lane[0],
             (unsigned long long)set.lane[1]);
    for (size_t r = 0; r < saw->engine_result->n_ranks; r++) {
        if (strstr(saw->engine_result->answers[r].body, want) == NULL) {
            sim_fail(sim, "weights", "rank %zu holds other weights after %s than its trainer sent",
                     r, sim_call_name(saw->call));
            return;
        }
    }
}

static void on_answer(sim_t *sim, state_t *self, const sim_saw_t *saw)
{
    book_t *book = &self->book;
    const sim_call_t *call = saw->call;
    if (call->kind != SIM_CALL_UPDATE || call->verb == UPDATE_VERB_SET_VERSION ||
        call->fn == NULL) {
        return;
    }
    if (call->status != LK_OK) {
        bool refused = call->status == LK_ERR_STATE || call->status == LK_ERR_INVALID;
        if (!refused) {
            book->sure = false; /* it may have had an effect */
        }
        return;
    }
    switch (call->verb) {
    case UPDATE_VERB_START:
        on_start(book);
        break;
    case UPDATE_VERB_UPDATE: {
        sim_sent_t sent = sim_trainer_sent(call);
        on_update(book, &sent);
        break;
    }
    case UPDATE_VERB_FINISH:
        on_finish(sim, book, saw);
        break;
    default:
        break;
    }
}

static void saw(sim_t *sim, void *state, const sim_saw_t *saw)
{
    state_t *self = state;
    if (self->posted == NULL) {
        self->posted = calloc(sim->o.ranks, sizeof *self->posted);
        self->looked_at = calloc(sim->o.ranks, sizeof *self->looked_at);
        CHECK(self->posted != NULL && self->looked_at != NULL);
    }
    switch (saw->kind) {
    case SIM_SAW_STEP_POST:
        on_post(sim, self, saw->rank, saw->batch);
        break;
    case SIM_SAW_STEP_DONE:
        on_done(sim, self, saw->rank);
        break;
    case SIM_SAW_RANK_UP:
        self->looked_at[saw->rank] = 0;
        break;
    case SIM_SAW_ANSWERED:
        on_answer(sim, self, saw);
        break;
    default:
        break;
    }
}

static void fini(sim_t *sim, void *state)
{
    state_t *self = state;
    free(self->posted);
    free(self->looked_at);
    free(self->book.tensors);
    free(self->book.pending);
    free(self->book.sent);
}

const sim_checker_t check_weights = {
    .name = "weights", .state_size = sizeof(state_t), .saw = saw, .fini = fini};
