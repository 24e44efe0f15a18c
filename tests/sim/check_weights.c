/*
 * check_weights.c: an epoch's weights are the same on every rank, from its first step to its last,
 * and they are the trainer's: recomputed here from the numbers in a rank's memory and from those
 * that the trainer sent, by the formula of transfer/digest.h written down again.
 */
#include "tests/sim/checkers.h"
#include "tests/sim/net.h"
#include "base/check.h"
#include "base/hash.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define STEPS 8 /* ranks of a group are at most one step apart */

typedef struct {
    digest_t *tensors; /* [n]: of the committed set, as the trainers' answers tell */
    digest_t *pending; /* of the open session */
    bool *sent;        /* [n]: by the open session */
    bool sure;         /* no answer is missing since the last whole set */
    bool mixed;        /* the session has what another trainer sent than the one that asked */
    size_t n;
} book_t;

typedef struct {
    uint64_t step, epoch;
    bool used;
} step_t;

/* A weight call and the command that became of it. */
typedef struct {
    size_t index;
    uint32_t front;
    const void *trainer;
    update_verb_t verb;
    uint64_t generation, number; /* 0: not sent yet */
    bool over, in_effect;
    size_t first, n; /* UPDATE: tensors */
    digest_t *digests;
    char want[40]; /* FINISH: the set's digest; "" if it is not known */
} call_t;

typedef struct {
    struct {
        uint64_t epoch;
        digest_t digest;
    } * versions; /* newest last */
    size_t n_versions, cap_versions;
    uint64_t *looked_at; /* [ranks]: 1 + epoch whose numbers were recomputed last */
    bool *fresh;         /* [ranks]: nothing was committed since it started */
    digest_t *posted;    /* [ranks]: digest when the step under way was posted */
    step_t steps[STEPS]; /* of a lockstep group */
    book_t book;
    const void *trainer; /* that the transfer engine is connected with */
    const tensor_desc_t *descs;
    call_t *calls;
    size_t n_calls, cap_calls;
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

digest_t sim_memory_digest(const sim_t *sim, uint32_t rank)
{
    const weight_table_t *table = table_of(sim, rank);
    digest_t sum = {{0, 0}};
    for (size_t i = 0; i < weight_table_count(table); i++) {
        const weight_slot_t *slot = weight_table_at(table, i);
        digest_t of = slot->data != NULL ? digest_of(slot->data, slot->numel) : slot->digest;
        for (uint64_t l = 0; l < 2; l++) {
            uint64_t name = lk_hash64(slot->name, strlen(slot->name), l);
            sum.lane[l] += mix(mix(name) ^ of.lane[l]);
        }
    }
    return sum;
}

static void check_version(sim_t *sim, state_t *self, uint32_t rank, uint64_t epoch, digest_t digest)
{
    for (size_t i = self->n_versions; i-- > 0;) {
        if (self->versions[i].epoch != epoch) {
            continue;
        }
        if (!same(self->versions[i].digest, digest)) {
            sim_fail(sim, "weights", "rank %u steps with other weights than those of epoch %llu",
                     rank, (unsigned long long)epoch);
        }
        return;
    }
    if (self->n_versions == self->cap_versions) {
        self->cap_versions = 2 * self->cap_versions + 16;
        self->versions = realloc(self->versions, self->cap_versions * sizeof *self->versions);
        CHECK(self->versions != NULL);
    }
    self->versions[self->n_versions].epoch = epoch;
    self->versions[self->n_versions++].digest = digest;
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

static void on_step_done(sim_t *sim, state_t *self, uint32_t rank)
{
    if (!same(self->posted[rank], weight_table_digest(table_of(sim, rank)))) {
        sim_fail(sim, "weights", "rank %u: the weights changed under a step", rank);
    }
}

/* ---- what the trainers sent: in the order in which the ranks answer, which is the agreed one ----
 */

static void open_book(book_t *book, size_t n)
{
    if (book->tensors == NULL) {
        book->n = n;
        book->tensors = calloc(n, sizeof *book->tensors);
        book->pending = calloc(n, sizeof *book->pending);
        book->sent = calloc(n, sizeof *book->sent);
        CHECK(book->tensors != NULL && book->pending != NULL && book->sent != NULL);
    }
}

static void on_asked(state_t *self, const sim_call_t *call)
{
    if (call->kind != SIM_CALL_UPDATE) {
        return;
    }
    if (self->n_calls == self->cap_calls) {
        self->cap_calls = 2 * self->cap_calls + 32;
        self->calls = realloc(self->calls, self->cap_calls * sizeof *self->calls);
        CHECK(self->calls != NULL);
    }
    call_t *c = &self->calls[self->n_calls++];
    *c = (call_t){
        .index = call->index, .front = call->front, .trainer = call->ctx, .verb = call->verb};
    if (call->verb != UPDATE_VERB_UPDATE) {
        return;
    }
    sim_sent_t sent = sim_trainer_sent(call);
    open_book(&self->book, sent.n_tensors);
    self->descs = sent.descs;
    c->first = sent.first;
    c->n = sent.n;
    c->digests = calloc(sent.n + 1, sizeof *c->digests);
    CHECK(c->digests != NULL);
    for (size_t i = 0; i < sent.n; i++) {
        uint64_t numel = 0;
        CHECK(tensor_desc_numel(&sent.descs[sent.first + i], &numel));
        c->digests[i] = digest_of(sent.data[sent.first + i], numel);
    }
}

/* The command of the oldest such call that has none yet. */
static void on_cmd(state_t *self, const msg_cmd_t *cmd)
{
    call_t *oldest = NULL;
    for (size_t i = 0; i < self->n_calls; i++) {
        call_t *c = &self->calls[i];
        if (c->front == cmd->client && c->number == cmd->number &&
            c->generation == cmd->generation) {
            return; /* to another rank, or again */
        }
        if (oldest == NULL && c->number == 0 && !c->over && c->front == cmd->client &&
            c->verb == cmd->verb) {
            oldest = c;
        }
    }
    if (oldest != NULL) {
        oldest->generation = cmd->generation;
        oldest->number = cmd->number;
    }
}

/* A call that was answered before it was sent never will be. */
static void on_answered(state_t *self, const sim_call_t *call)
{
    for (size_t i = 0; i < self->n_calls; i++) {
        if (self->calls[i].index == call->index) {
            self->calls[i].over = true;
        }
    }
}

static void commit(sim_t *sim, state_t *self, call_t *c)
{
    book_t *book = &self->book;
    memset(self->fresh, 0, sim->o.ranks * sizeof *self->fresh);
    if (book->tensors == NULL) {
        return; /* nothing was ever sent */
    }
    bool whole = true;
    for (size_t i = 0; i < book->n; i++) {
        whole &= book->sent[i];
        if (book->sent[i]) {
            book->tensors[i] = book->pending[i];
        }
        book->sent[i] = false;
    }
    book->sure |= whole; /* the first set of all is not a trainer's */
    book->sure &= !book->mixed;
    if (book->sure) {
        digest_t set = digest_of_set(book->tensors, self->descs, book->n);
        snprintf(c->want, sizeof c->want, "%016llx%016llx", (unsigned long long)set.lane[0],
                 (unsigned long long)set.lane[1]);
    }
}

static void take_effect(sim_t *sim, state_t *self, call_t *c)
{
    book_t *book = &self->book;
    if (c->verb == UPDATE_VERB_INIT) {
        self->trainer = c->trainer;
    }
    if (c->verb == UPDATE_VERB_START && book->sent != NULL) {
        memset(book->sent, 0, book->n * sizeof *book->sent);
        book->mixed = false;
    }
    /* A collective has no name: whoever is at its other end sends. Two trainers at once are the
     * user's mistake. */
    book->mixed |=
        c->verb == UPDATE_VERB_UPDATE && c->trainer != self->trainer && sim->o.backend == 2;
    for (size_t i = 0; c->verb == UPDATE_VERB_UPDATE && i < c->n; i++) {
        book->pending[c->first + i] = c->digests[i];
        book->sent[c->first + i] = true;
    }
    if (c->verb == UPDATE_VERB_FINISH) {
        commit(sim, self, c);
    }
}

static void on_done(sim_t *sim, state_t *self, uint32_t front, const msg_done_t *done)
{
    for (size_t i = 0; i < self->n_calls && done->status == LK_OK; i++) {
        call_t *c = &self->calls[i];
        if (c->front != front || c->generation != done->generation || c->number != done->number) {
            continue;
        }
        if (!c->in_effect) {
            c->in_effect = true;
            take_effect(sim, self, c);
        }
        if (c->want[0] != '\0' && strstr(msg_cstr(done->body), c->want) == NULL) {
            sim_fail(sim, "weights", "rank %llu holds other weights after %s than were sent to it",
                     (unsigned long long)done->rank, update_verb_name(c->verb));
        }
        return;
    }
}

/* It has the checkpoint's weights. Once nobody has what the trainers sent, the book says nothing.
 */
static void on_fresh(sim_t *sim, state_t *self, uint32_t rank)
{
    bool any = false;
    self->fresh[rank] = true;
    for (uint32_t r = 0; r < sim->o.ranks; r++) {
        any |= !self->fresh[r] && !sim->removed[r];
    }
    self->book.sure &= any;
}

static void saw(sim_t *sim, void *state, const sim_saw_t *saw)
{
    state_t *self = state;
    if (self->posted == NULL) {
        self->posted = calloc(sim->o.ranks, sizeof *self->posted);
        self->looked_at = calloc(sim->o.ranks, sizeof *self->looked_at);
        self->fresh = calloc(sim->o.ranks, sizeof *self->fresh);
        CHECK(self->posted != NULL && self->looked_at != NULL && self->fresh != NULL);
    }
    switch (saw->kind) {
    case SIM_SAW_STEP_POST:
        on_post(sim, self, saw->rank, saw->batch);
        break;
    case SIM_SAW_STEP_DONE:
        on_step_done(sim, self, saw->rank);
        break;
    case SIM_SAW_RANK_UP:
        self->looked_at[saw->rank] = 0;
        on_fresh(sim, self, saw->rank);
        break;
    case SIM_SAW_FORMED:
        memset(self->steps, 0, sizeof self->steps); /* they count from 0 again */
        break;
    case SIM_SAW_ASKED:
        on_asked(self, saw->call);
        break;
    case SIM_SAW_ANSWERED:
        on_answered(self, saw->call);
        break;
    case SIM_SAW_SENT:
        if (saw->msg->type == MSG_CMD && saw->msg->cmd.kind == CMD_UPDATE) {
            on_cmd(self, &saw->msg->cmd);
        } else if (saw->msg->type == MSG_DONE) {
            on_done(sim, self, saw->to - sim_node_front(sim, 0), &saw->msg->done);
        }
        break;
    default:
        break;
    }
}

static void fini(sim_t *sim, void *state)
{
    state_t *self = state;
    free(self->versions);
    free(self->posted);
    free(self->looked_at);
    free(self->fresh);
    for (size_t i = 0; i < self->n_calls; i++) {
        free(self->calls[i].digests);
    }
    free(self->calls);
    free(self->book.tensors);
    free(self->book.pending);
    free(self->book.sent);
}

const sim_checker_t check_weights = {
    .name = "weights", .state_size = sizeof(state_t), .saw = saw, .fini = fini};
