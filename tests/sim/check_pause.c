/*
 * check_pause.c: from the first rank's answer to a pause on, no rank steps until something that can
 * lift it has been asked for; and what the mode promises is true on the rank that answers.
 *
 * A pause is prompt: once every rank has it, a lockstep group takes at most sync_interval steps and
 * the one under way. (Not so behind a weight call, which is exclusive in its stream. Independent
 * ranks need a vote of each other for it, which is a time, not a number of steps.)
 *
 * Seen from the messages alone. A RESUME or a CANCEL can lift a pause as long as some rank has not
 * answered it, so a pause that is answered while one is open proves nothing.
 */
#include "tests/sim/checkers.h"
#include "tests/sim/net.h"
#include "base/check.h"

#include <stdlib.h>
#include <string.h>

typedef struct {
    uint32_t front;
    uint64_t generation, number, kind, mode, target, deadline_ns;
    bool *done, *seen;                  /* [ranks]: answered; acknowledged */
    uint32_t n_done, n_seen, n_members; /* members: when it was sent */
    uint64_t *steps;                    /* [ranks]: taken when the last rank acknowledged it */
    bool acked;                         /* a PAUSE: with LK_OK by some rank */
    bool behind; /* a PAUSE: a weight call was open when the last rank acknowledged it */
} command_t;

typedef struct {
    command_t *commands;
    size_t n, cap;
    size_t lifters;       /* RESUMEs and CANCELs that some rank has not answered */
    size_t updates;       /* weight calls that some rank has not answered */
    bool stopped;         /* a pause is in force, and nothing that lifts it is open */
    bool keep_since_lift; /* some pause since the last lift was not `wait` */
    bool everywhere;      /* every rank has answered it: the caller may know */
    uint64_t stopped_by;  /* its number */
    uint32_t stopped_at;  /* and front end */
    uint64_t *steps;      /* [ranks]: posted so far */
    uint64_t epoch;
    bool *holds;   /* [ranks]: this process has answered the pause in force */
    bool *outside; /* [ranks]: it has left its group, or has died: */
    uint32_t n_outside;
} state_t;

static bool lifts(const command_t *c)
{
    return c->kind == CMD_RESUME || c->kind == CMD_CANCEL;
}

static command_t *find(state_t *self, uint32_t front, uint64_t generation, uint64_t number)
{
    for (size_t i = self->n; i-- > 0;) {
        command_t *c = &self->commands[i];
        if (c->front == front && c->generation == generation && c->number == number) {
            return c;
        }
    }
    return NULL;
}

static void on_cmd(sim_t *sim, state_t *self, const msg_cmd_t *cmd)
{
    if (find(self, (uint32_t)cmd->client, cmd->generation, cmd->number) != NULL) {
        return; /* to another rank, or again */
    }
    if (self->n == self->cap) {
        self->cap = 2 * self->cap + 64;
        self->commands = realloc(self->commands, self->cap * sizeof *self->commands);
        CHECK(self->commands != NULL);
    }
    command_t *c = &self->commands[self->n++];
    *c = (command_t){.front = (uint32_t)cmd->client,
                     .generation = cmd->generation,
                     .number = cmd->number,
                     .kind = cmd->kind,
                     .mode = cmd->mode,
                     .target = cmd->target,
                     .deadline_ns = cmd->deadline_ns,
                     .n_members = sim->n_members,
                     .done = calloc(sim->o.ranks, sizeof *c->done),
                     .seen = calloc(sim->o.ranks, sizeof *c->seen),
                     .steps = calloc(sim->o.ranks, sizeof *c->steps)};
    CHECK(c->done != NULL && c->seen != NULL && c->steps != NULL);
    if (lifts(c)) {
        self->lifters++;
        self->stopped = false;
    }
    self->updates += cmd->kind == CMD_UPDATE;
    self->keep_since_lift |= cmd->kind == CMD_PAUSE && cmd->mode != PAUSE_WAIT;
}

/* Whether the PAUSE is one that its front end has cancelled, or gives up now: it then ends no
 * requests. */
static bool is_cancelled(const sim_t *sim, const state_t *self, const command_t *pause)
{
    if (pause->deadline_ns != 0 && sim->now_ns >= pause->deadline_ns) {
        return true;
    }
    for (size_t i = 0; i < self->n; i++) {
        const command_t *c = &self->commands[i];
        if (c->kind == CMD_CANCEL && c->front == pause->front &&
            c->generation == pause->generation && c->target == pause->number) {
            return true;
        }
    }
    return false;
}

/* SEEN acknowledges all commands up to its own. */
static void on_seen(sim_t *sim, state_t *self, uint32_t front, const msg_seen_t *seen)
{
    for (size_t i = self->n; i-- > 0;) {
        command_t *c = &self->commands[i];
        if (c->front != front || c->generation != seen->generation || c->number > seen->number ||
            seen->rank >= sim->o.ranks) {
            continue;
        }
        if (c->seen[seen->rank]) {
            return; /* and so are all before it */
        }
        c->seen[seen->rank] = true;
        if (++c->n_seen == c->n_members) {
            memcpy(c->steps, self->steps, sim->o.ranks * sizeof *c->steps);
            c->behind = self->updates > 0;
        }
    }
}

static void check_prompt(sim_t *sim, const state_t *self, uint32_t rank, const command_t *pause)
{
    bool lockstep = sim->o.moe && sim->o.ranks > 1;
    uint64_t limit = sim->o.sync_interval + 1;
    if (!lockstep || pause->n_seen < pause->n_members || pause->mode == PAUSE_WAIT ||
        pause->behind) {
        return;
    }
    uint64_t steps = self->steps[rank] - pause->steps[rank];
    sim->result.pauses++;
    sim->result.pause_steps += steps;
    sim->result.pause_steps_most = LK_MAX(sim->result.pause_steps_most, steps);
    if (steps > limit) {
        sim_fail(
            sim, "pause",
            "rank %u took %llu steps after every rank had pause %llu of front end %u; %llu are "
            "allowed",
            rank, (unsigned long long)steps, (unsigned long long)pause->number, pause->front,
            (unsigned long long)limit);
    }
}

/* The rank's state in the very call in which it answers. */
static void check_mode(sim_t *sim, const state_t *self, uint32_t rank, const command_t *pause)
{
    const scheduler_t *s = engine_core_scheduler(sim->ranks[rank].core);
    size_t left = scheduler_num_running(s) + scheduler_num_waiting(s);
    if (pause->mode == PAUSE_ABORT && left > 0 && !is_cancelled(sim, self, pause)) {
        sim_fail(sim, "pause", "rank %u answers a pause in mode abort and holds %zu requests", rank,
                 left);
    }
    if (pause->mode == PAUSE_WAIT && !self->keep_since_lift && scheduler_num_started(s) > 0) {
        sim_fail(sim, "pause", "rank %u answers a pause in mode wait, and %zu requests are running",
                 rank, scheduler_num_started(s));
    }
}

static void on_done(sim_t *sim, state_t *self, uint32_t front, const msg_done_t *done)
{
    command_t *c = find(self, front, done->generation, done->number);
    if (c == NULL || done->rank >= sim->o.ranks || c->done[done->rank]) {
        return;
    }
    c->done[done->rank] = true;
    c->n_done++;
    self->updates -= c->kind == CMD_UPDATE && c->n_done == c->n_members;
    if (lifts(c)) {
        self->lifters -= c->n_done == c->n_members;
        return;
    }
    if (c->kind != CMD_PAUSE || done->status != LK_OK) {
        return;
    }
    check_mode(sim, self, (uint32_t)done->rank, c);
    check_prompt(sim, self, (uint32_t)done->rank, c);
    if (!c->acked && self->lifters == 0 && self->n_outside == 0) {
        self->everywhere &= self->stopped;
        self->stopped = true;
        self->stopped_by = c->number;
        self->stopped_at = c->front;
        memset(self->holds, 0, sim->o.ranks * sizeof *self->holds);
    }
    c->acked = true;
    self->everywhere |= c->n_done == c->n_members;
    self->holds[done->rank] = true;
}

static void on_step(sim_t *sim, const state_t *self, uint32_t rank, const exec_batch_t *batch)
{
    if (self->stopped) {
        sim_fail(sim, "pause",
                 "rank %u takes step %llu although pause %llu of front end %u was answered, and "
                 "nobody has resumed",
                 rank, (unsigned long long)batch->step, (unsigned long long)self->stopped_by,
                 self->stopped_at);
    }
}

/* Commands of an older epoch that are not applied are forgotten, so none of them can lift anything
 * any more. The pause itself stays in force if a process that answered it is still there. */
static void on_formed(sim_t *sim, state_t *self, uint64_t epoch)
{
    if (epoch == self->epoch) {
        return;
    }
    self->epoch = epoch;
    for (size_t i = 0; i < self->n; i++) {
        free(self->commands[i].done);
        free(self->commands[i].seen);
        free(self->commands[i].steps);
    }
    self->n = self->lifters = self->updates = 0;
    bool held = false;
    for (uint32_t r = 0; r < sim->o.ranks; r++) {
        held |= self->holds[r];
    }
    self->stopped &= held;
    self->keep_since_lift |= held; /* it holds for ranks that had not drained, too */
}

/* What is decided from now on may never come to it. */
static void set_outside(state_t *self, uint32_t rank, bool outside)
{
    self->n_outside += (uint32_t)(outside - self->outside[rank]);
    self->outside[rank] = outside;
    self->stopped &= !outside || self->everywhere;
}

static void saw(sim_t *sim, void *state, const sim_saw_t *saw)
{
    state_t *self = state;
    if (self->steps == NULL) {
        self->steps = calloc(sim->o.ranks, sizeof *self->steps);
        self->holds = calloc(sim->o.ranks, sizeof *self->holds);
        self->outside = calloc(sim->o.ranks, sizeof *self->outside);
        CHECK(self->steps != NULL && self->holds != NULL && self->outside != NULL);
    }
    if (saw->kind == SIM_SAW_FORMED) {
        set_outside(self, saw->rank, false);
        for (uint32_t r = 0; r < sim->o.ranks; r++) {
            if (sim->removed[r]) { /* nothing has to come to it */
                set_outside(self, r, false);
            }
        }
        on_formed(sim, self, saw->epoch);
    } else if (saw->kind == SIM_SAW_LEFT) {
        set_outside(self, saw->rank, true);
    } else if (saw->kind == SIM_SAW_RANK_DOWN) {
        set_outside(self, saw->rank, true);
        self->holds[saw->rank] = false;
    } else if (saw->kind == SIM_SAW_STEP_POST) {
        self->steps[saw->rank]++;
        on_step(sim, self, saw->rank, saw->batch);
    } else if (saw->kind == SIM_SAW_SENT && saw->msg->type == MSG_CMD) {
        on_cmd(sim, self, &saw->msg->cmd);
    } else if (saw->kind == SIM_SAW_SENT && saw->msg->type == MSG_SEEN) {
        on_seen(sim, self, saw->to - sim_node_front(sim, 0), &saw->msg->seen);
    } else if (saw->kind == SIM_SAW_SENT && saw->msg->type == MSG_DONE) {
        on_done(sim, self, saw->to - sim_node_front(sim, 0), &saw->msg->done);
    }
}

static void fini(sim_t *sim, void *state)
{
    state_t *self = state;
    for (size_t i = 0; i < self->n; i++) {
        free(self->commands[i].done);
        free(self->commands[i].seen);
        free(self->commands[i].steps);
    }
    free(self->commands);
    free(self->steps);
    free(self->holds);
    free(self->outside);
}

const sim_checker_t check_pause = {
    .name = "pause", .state_size = sizeof(state_t), .saw = saw, .fini = fini};
