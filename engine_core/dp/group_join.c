/* group_join.c: how a rank leaves its group epoch, and the first rounds of the next one
 * (docs/MEMBERSHIP.md, "Leave" and J). */
#include "engine_core/dp/group_internal.h"
#include "base/buf.h"
#include "base/check.h"
#include "base/hash.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Five words of each rank; the vector has those of the rank at place r from 5 * r on. In this file
 * a rank is a place among the members, but in texts. */
enum { FACT_EPOCH, FACT_TAKEN, FACT_CONTENT, FACT_LABEL, FACT_FLAGS, N_FACTS };

/* Bits of FACT_FLAGS; the upper half is the hash of what must be equal. */
enum { FLAG_PAUSED = 1, FLAG_CLEARED = 2, FLAG_SPOILED = 4, FLAG_UNDECIDED = 8, FLAG_FRESH = 16 };

#define LABEL_WORDS ((WEIGHT_LABEL_MAX + 1 + 7) / 8)

/* ---- leaving ---- */

static void forget_commands(group_t *self)
{
    for (uint32_t f = 0; f < self->config.n_frontends; f++) {
        stream_reset(&self->streams[f]);
    }
    memset(self->done, 0, self->config.n_frontends * sizeof *self->done);
    self->more = false;
    self->posted = self->posted_idle = false;
    self->voted_quiet = self->voted_expired = false;
    self->invited = 0;
    self->foreign_start = false;
}

/* What the open session leaves behind here. */
static void leave_session(group_t *self, bool was_member, bool clean, const char *why)
{
    const group_update_t *u = &self->update;
    bool dirty = self->weights.gates & GATE_DIRTY, shadow = self->weights.shadow;
    /* Others may have had the group's word on a commit that this rank waits for: in place it has
     * carried it out, with shadow swap it has not, but has voted that it could. */
    bool unknown =
        u->committing && (shadow ? self->posted && u->voted_ended : u->phase != UPDATE_NONE);
    self->spoiled |= (dirty && was_member && !self->mixed) || !clean ||
                     (unknown && !shadow && u->result.status < 0);
    self->undecided |= unknown && !shadow;
    self->weights.taken += unknown; /* published by somebody who is gone, perhaps */
    group_end_update(self);
    weight_state_close_session(&self->weights, clean, why);
    self->weights.configured = false;
    if (unknown && !(self->weights.gates & GATE_DIRTY)) {
        weight_state_mark_dirty(&self->weights, "it is not known whether finish_weight_update "
                                                "succeeded on every rank");
    }
}

void group_leave(group_t *self, bool clean, const char *why)
{
    if (self->phase == GROUP_OUTSIDE) {
        return;
    }
    bool was_dirty = self->weights.gates & GATE_DIRTY, was_member = self->phase == GROUP_MEMBER;
    self->phase = GROUP_OUTSIDE;
    lk_text(self->left_why, sizeof self->left_why, "%s", why);
    leave_session(self, was_member, clean, why);
    forget_commands(self);
    pause_leave(&self->pause);
    self->sc = 0;
    bool closed = self->weights.gates != 0 || pause_is_paused(&self->pause);
    /* Who had not joined yet may do what it did before: a rank that was just started, nothing. */
    self->run = !self->config.lockstep && !closed && (was_member || self->run);
    if (!was_dirty && (self->weights.gates & GATE_DIRTY) && !self->config.lockstep) {
        group_push(self, GROUP_ACT_DIRTY, self->weights.dirty_why);
    }
}

void group_form(group_t *self, uint64_t group_epoch, uint64_t weight_floor, const roster_t *roster,
                bool fresh)
{
    CHECK(group_epoch > self->config.group_epoch || fresh);
    if (roster != NULL) {
        group_seat(self, roster);
    }
    self->config.group_epoch = group_epoch;
    self->phase = GROUP_JOINING;
    self->weight_floor = weight_floor;
    self->fresh |= fresh;
    self->round = self->wave = 0;
    self->sc = 0;
    if (fresh) {
        self->run = false; /* until it is known whose weights are the newest */
    }
}

void group_reload(group_t *self)
{
    CHECK(self->phase == GROUP_OUTSIDE);
    uint64_t taken = self->weights.taken;
    weight_state_init(&self->weights, self->config.shadow);
    self->weights.taken = taken;
    self->spoiled = self->undecided = self->held_apart = self->mixed = false;
    self->behind = self->behind_here = false;
    self->fresh = true;
    self->run = false;
}

bool group_is_member(const group_t *self)
{
    return self->phase == GROUP_MEMBER;
}

const char *group_left_why(const group_t *self)
{
    return self->phase == GROUP_MEMBER ? NULL : self->left_why;
}

/* ---- voting ---- */

static uint64_t label_hash(const char *label)
{
    return lk_hash64(label, strlen(label), 0);
}

static group_held_t held(const group_t *self)
{
    group_held_t mine = self->held;
    if (!self->held_apart) {
        mine.epoch = self->weights.epoch;
        snprintf(mine.version, sizeof mine.version, "%s", self->weights.version);
    }
    return mine;
}

const group_held_t *group_held(group_t *self)
{
    self->held = held(self);
    return &self->held;
}

/* What all ranks of an epoch are set up with; 32 bits of it. */
static uint64_t config_hash(const group_t *self)
{
    uint64_t words[] = {self->config.group_epoch,   self->config.size,
                        self->config.n_frontends,   self->config.lockstep,
                        self->config.sync_interval, self->weight_floor};
    uint64_t members =
        lk_hash64(self->roster.ranks, self->roster.n * sizeof self->roster.ranks[0], 0);
    return lk_hash64(words, sizeof words, members) >> 32;
}

size_t group_join_len(const group_t *self)
{
    return self->phase == GROUP_LABEL ? LABEL_WORDS : N_FACTS * (size_t)self->config.size;
}

static void vote_facts(const group_t *self, const group_view_t *view, uint64_t *vec)
{
    group_held_t mine = held(self);
    uint64_t *facts = vec + N_FACTS * (size_t)self->config.rank;
    uint64_t flags = (pause_is_paused(&self->pause) ? FLAG_PAUSED : 0) |
                     (self->pause.cleared ? FLAG_CLEARED : 0) |
                     (self->spoiled || !view->clean ? FLAG_SPOILED : 0) |
                     (self->undecided ? FLAG_UNDECIDED : 0) | (self->fresh ? FLAG_FRESH : 0);
    facts[FACT_EPOCH] = mine.epoch;
    facts[FACT_TAKEN] = self->weights.taken;
    facts[FACT_CONTENT] = view->held_content;
    facts[FACT_LABEL] = label_hash(mine.version);
    facts[FACT_FLAGS] = config_hash(self) << 32 | flags;
}

static void vote_label(const group_t *self, uint64_t *vec)
{
    if (self->label_owner == self->config.rank) {
        char text[LABEL_WORDS * 8] = {0};
        group_held_t mine = held(self);
        memcpy(text, mine.version, strlen(mine.version));
        memcpy(vec, text, sizeof text);
    }
}

void group_join_vote(group_t *self, const group_view_t *view, uint64_t *vec)
{
    memset(vec, 0xff, group_join_len(self) * sizeof *vec);
    if (self->phase == GROUP_LABEL) {
        vote_label(self, vec);
    } else {
        vote_facts(self, view, vec);
    }
    self->posted = true;
    self->posted_idle = true;
}

/* ---- deciding ---- */

/* What the facts say, equally on all ranks. */
typedef struct {
    const uint64_t *v;
    uint32_t size;
    uint64_t epoch;    /* newest there ever was */
    uint64_t taken;    /* newest that there may have been */
    int64_t reference; /* rank, or -1 */
    uint32_t newest;   /* lowest rank with the newest weights that are left */
} findings_t;

static const uint64_t *facts_of(const findings_t *f, uint32_t rank)
{
    return f->v + N_FACTS * (size_t)rank;
}

static findings_t find(const group_t *self, const uint64_t *v)
{
    findings_t f = {v, self->config.size, self->weight_floor, self->weight_floor, -1, 0};
    for (uint32_t r = 0; r < f.size; r++) {
        const uint64_t *facts = facts_of(&f, r);
        f.epoch = LK_MAX(f.epoch, facts[FACT_EPOCH]);
        f.taken = LK_MAX(f.taken, facts[FACT_TAKEN]);
        f.newest = facts[FACT_EPOCH] > facts_of(&f, f.newest)[FACT_EPOCH] ? r : f.newest;
    }
    for (uint32_t r = f.size; r-- > 0;) {
        const uint64_t *facts = facts_of(&f, r);
        bool usable = !(facts[FACT_FLAGS] & (FLAG_SPOILED | FLAG_UNDECIDED));
        f.reference = usable && facts[FACT_EPOCH] == f.epoch ? (int64_t)r : f.reference;
    }
    return f;
}

static bool in_step(const findings_t *f, uint32_t rank)
{
    const uint64_t *facts = facts_of(f, rank);
    return f->reference >= 0 && !(facts[FACT_FLAGS] & FLAG_SPOILED) &&
           facts[FACT_CONTENT] == facts_of(f, (uint32_t)f->reference)[FACT_CONTENT];
}

static bool any_flag(const findings_t *f, uint64_t flag)
{
    bool any = false;
    for (uint32_t r = 0; r < f->size; r++) {
        any |= (facts_of(f, r)[FACT_FLAGS] & flag) != 0;
    }
    return any;
}

static const char *state_of(const findings_t *f, uint32_t rank)
{
    uint64_t flags = facts_of(f, rank)[FACT_FLAGS];
    return flags & FLAG_SPOILED     ? ", half updated"
           : flags & FLAG_UNDECIDED ? ", commit not agreed"
           : flags & FLAG_FRESH     ? ", as loaded when it was started"
                                    : "";
}

/* "rank 0: weight epoch 3; rank 1: weight epoch 0, as loaded when it was started" */
static void say_who_holds_what(const group_t *self, const findings_t *f, lk_buf_t *out)
{
    const uint32_t most = 8;
    for (uint32_t r = 0; r < f->size && r < most; r++) {
        lk_buf_printf(out, "%srank %u: weight epoch %llu%s", r > 0 ? "; " : "", group_name(self, r),
                      (unsigned long long)facts_of(f, r)[FACT_EPOCH], state_of(f, r));
    }
    if (f->size > most) {
        lk_buf_printf(out, "; and %u more, see /weight_info", f->size - most);
    }
}

static void say_update_needed(const group_t *self, const findings_t *f, char *out, size_t room)
{
    lk_buf_t text;
    lk_buf_init(&text, 0);
    lk_buf_printf(&text, "group epoch %llu was formed by ranks with different weights (",
                  (unsigned long long)self->config.group_epoch);
    say_who_holds_what(self, f, &text);
    if (f->reference < 0 && self->weight_floor == f->epoch) {
        lk_buf_printf(&text, "; nobody holds epoch %llu, the newest", (unsigned long long)f->epoch);
    }
    lk_buf_str(&text, ")");
    snprintf(out, room, "%s", lk_buf_cstr(&text));
    lk_buf_fini(&text);
}

/* The label is agreed, too: the group exists. */
static void joined(group_t *self)
{
    self->phase = GROUP_MEMBER;
    self->left_why[0] = '\0';
    self->held_apart = !self->in_step;
    self->undecided &= !self->in_step; /* it turned out to be what the others have */
    self->run =
        !self->config.lockstep && !pause_is_paused(&self->pause) && self->weights.gates == 0;
    group_push(self, GROUP_ACT_RELABEL, NULL);
    if (self->config.lockstep ? self->weights.gates & GATE_DIRTY : self->behind_here) {
        group_push(self, GROUP_ACT_DIRTY, self->weights.dirty_why);
    }
    if (self->config.rank == 0) {
        group_push(self, GROUP_ACT_REPORT, NULL);
    }
}

static void take_findings(group_t *self, const findings_t *f)
{
    bool mine = in_step(f, self->config.rank), all = true;
    for (uint32_t r = 0; r < f->size; r++) {
        all &= in_step(f, r);
    }
    self->held = held(self);
    self->held_apart = true; /* until the label is there, too: this epoch may end before */
    self->in_step = mine;
    self->behind_here = !mine && !self->config.lockstep;
    self->behind = !all && !self->config.lockstep;
    self->mixed = !all;
    self->weights.gates = 0;
    self->weights.dirty_why[0] = '\0';
    /* Commits that nobody is left to tell of may have been numbered on from here. */
    self->weights.epoch = f->epoch + (f->reference < 0 ? GROUP_EPOCH_SKIP : 0);
    self->weights.taken = LK_MAX(self->weights.epoch, f->taken);
    if (!all) {
        char text[LK_ERROR_TEXT_MAX];
        say_update_needed(self, f, text, sizeof text);
        weight_state_mark_dirty(&self->weights, text);
        self->weights.gates = self->config.lockstep ? GATE_DIRTY : 0;
    }
    pause_form(&self->pause, any_flag(f, FLAG_PAUSED), any_flag(f, FLAG_CLEARED));
}

static lk_status_t decide_facts(group_t *self, const uint64_t *v, lk_error_t *err)
{
    findings_t f = find(self, v);
    bool same_label = true;
    for (uint32_t r = 0; r < f.size; r++) {
        const uint64_t *facts = facts_of(&f, r);
        if (facts[FACT_FLAGS] >> 32 != config_hash(self)) {
            return lk_error_set(err, LK_ERR_INTERNAL,
                                "group epoch %llu: ranks %u and %u are set up differently",
                                (unsigned long long)self->config.group_epoch, group_name(self, r),
                                group_name(self, self->config.rank));
        }
        same_label &= facts[FACT_LABEL] == facts_of(&f, 0)[FACT_LABEL];
    }
    take_findings(self, &f);
    self->label_owner = f.reference >= 0 ? (uint32_t)f.reference : f.newest;
    if (same_label) { /* that of what the ranks hold, which need not be the last group's */
        weight_state_relabel(&self->weights, self->held.version);
        joined(self);
    } else {
        self->phase = GROUP_LABEL;
    }
    return LK_OK;
}

static lk_status_t decide_label(group_t *self, const uint64_t *v, lk_error_t *err)
{
    char text[LABEL_WORDS * 8];
    memcpy(text, v, sizeof text);
    if (memchr(text, '\0', WEIGHT_LABEL_MAX + 1) == NULL) {
        return lk_error_set(err, LK_ERR_INTERNAL, "rank %u sent no weight label",
                            group_name(self, self->label_owner));
    }
    weight_state_relabel(&self->weights, text);
    joined(self);
    return LK_OK;
}

lk_status_t group_join_decide(group_t *self, const uint64_t *v, lk_error_t *err)
{
    LK_RETURN_IF_ERROR(self->phase == GROUP_LABEL ? decide_label(self, v, err)
                                                  : decide_facts(self, v, err));
    self->posted = self->posted_idle = false;
    self->round++;
    return LK_OK;
}

/* ---- afterwards ---- */

void group_renewed(group_t *self)
{
    self->fresh = self->spoiled = self->undecided = self->mixed = false;
    self->behind = self->behind_here = self->held_apart = false;
}

bool group_needs_complete(const group_t *self)
{
    return (self->weights.gates & GATE_DIRTY) || self->behind;
}

const char *group_closed_why(const group_t *self)
{
    bool closed = (self->weights.gates & GATE_DIRTY) || self->behind_here;
    return closed ? self->weights.dirty_why : NULL;
}

unsigned group_gates(const group_t *self)
{
    return self->weights.gates | (self->behind_here ? GATE_DIRTY : 0u);
}
