#include "coordinator/membership.h"
#include "base/check.h"
#include "base/cpu_watch.h"
#include "base/env.h"
#include "base/log.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* An epoch that was there for so long did not break for the same reason as the one before. */
#define LASTED_NS (60 * LK_SECOND_NS)

struct membership {
    engine_registry_t *registry;
    membership_ops_t ops;
    membership_state_t state;
    uint64_t epoch, revision;
    bool adopted;
    uint64_t newest_left;           /* highest epoch that anybody says it left or heard of */
    uint64_t newest_weights, floor; /* reported; as of the last INIT */
    uint32_t breaks;                /* in a row, without a death */
    uint64_t serving_since_ns;
    char cause[LK_ERROR_TEXT_MAX];
};

const char *membership_state_name(membership_state_t state)
{
    static const char *const names[] = {
#define X(name) #name,
        MEMBERSHIP_STATE_TABLE(X)
#undef X
    };
    return (unsigned)state < LK_ARRAY_LEN(names) ? names[state] : "?";
}

membership_t *membership_new(engine_registry_t *registry, const membership_ops_t *ops,
                             uint64_t first_revision)
{
    membership_t *self = calloc(1, sizeof *self);
    if (self != NULL) {
        self->registry = registry;
        self->ops = *ops;
        self->revision = first_revision;
    }
    return self;
}

void membership_destroy(membership_t **self_p)
{
    if (self_p != NULL) {
        free(*self_p);
        *self_p = NULL;
    }
}

/* ---- epochs ---- */

static member_t *engine_at(const membership_t *self, uint32_t rank)
{
    return engine_registry_find(self->registry, MSG_ROLE_ENGINE, rank);
}

/* The next engine from rank r on that is not removed; NULL: none. */
static member_t *next_engine(const membership_t *self, uint32_t r)
{
    member_t *m = engine_at(self, r);
    while (m != NULL && m->removed) {
        m = engine_at(self, m->rank + 1);
    }
    return m;
}

static bool is_in_epoch(const member_t *m)
{
    return m->state == MEMBER_INITED || m->state == MEMBER_READY;
}

static void break_epoch(membership_t *self, int64_t lost, const char *why, uint64_t now_ns)
{
    if (self->state == MEMBERSHIP_GATHERING) {
        return;
    }
    bool lasted = self->state == MEMBERSHIP_SERVING && now_ns - self->serving_since_ns >= LASTED_NS;
    self->breaks = lost >= 0 || lasted ? 0 : self->breaks + 1;
    self->state = MEMBERSHIP_GATHERING;
    lk_text(self->cause, sizeof self->cause, "%s", why);
    LK_WARN("group epoch %llu is over: %s", (unsigned long long)self->epoch, why);
    member_t *m;
    for (m = next_engine(self, 0); m != NULL; m = next_engine(self, m->rank + 1)) {
        m->state = is_in_epoch(m) ? MEMBER_NEW : m->state; /* it has to say HELLO again */
    }
    self->ops.dissolve(self->ops.ctx, self->epoch, lost, why);
}

/* What INIT says has changed. */
static void init_engines(membership_t *self)
{
    member_t *m;
    self->revision++;
    for (m = next_engine(self, 0); m != NULL; m = next_engine(self, m->rank + 1)) {
        if (is_in_epoch(m)) {
            self->ops.init(self->ops.ctx, m);
        }
    }
}

static void init_frontends(membership_t *self)
{
    member_t *m;
    for (uint32_t f = 0; (m = engine_registry_find(self->registry, MSG_ROLE_FRONTEND, f)) != NULL;
         f++) {
        if (m->state == MEMBER_HELLO) {
            m->state = MEMBER_INITED;
            self->ops.init(self->ops.ctx, m);
        }
    }
}

/* A coordinator that was started again finds a group that is whole. */
static void adopt(membership_t *self, uint64_t epoch)
{
    self->epoch = epoch;
    self->adopted = true;
    self->floor = self->newest_weights;
    self->state = MEMBERSHIP_CONNECTING;
    member_t *m;
    bool all = true;
    for (m = next_engine(self, 0); m != NULL; m = next_engine(self, m->rank + 1)) {
        m->state = m->ready_for == epoch ? MEMBER_READY : MEMBER_INITED;
        all &= m->state == MEMBER_READY;
    }
    self->state = all ? MEMBERSHIP_SERVING : MEMBERSHIP_CONNECTING;
    init_frontends(self);
    init_engines(self); /* a front end may be elsewhere by now */
    LK_INFO("found group epoch %llu whole", (unsigned long long)epoch);
}

static void form(membership_t *self)
{
    self->epoch = 1 + LK_MAX(self->epoch, self->newest_left);
    self->adopted = false;
    self->floor = self->newest_weights;
    self->state = MEMBERSHIP_CONNECTING;
    LK_INFO("group epoch %llu is formed", (unsigned long long)self->epoch);
    member_t *m;
    for (m = next_engine(self, 0); m != NULL; m = next_engine(self, m->rank + 1)) {
        m->state = MEMBER_INITED;
        m->ready_for = 0;
    }
    init_engines(self);
    init_frontends(self);
}

/* Some are in a group that others are not in: they leave it and come again. */
static void dissolve_found(membership_t *self)
{
    member_t *m;
    for (m = next_engine(self, 0); m != NULL; m = next_engine(self, m->rank + 1)) {
        m->state = m->member_of != 0 ? MEMBER_NEW : m->state;
    }
    snprintf(self->cause, sizeof self->cause, "the coordinator found a group that was not whole");
    self->ops.dissolve(self->ops.ctx, LK_MAX(self->epoch, self->newest_left), -1, self->cause);
}

/* Everybody is here: a group that is whole is left alone, else the next epoch begins. */
static void try_form(membership_t *self)
{
    if (self->state != MEMBERSHIP_GATHERING ||
        !engine_registry_all(self->registry, MSG_ROLE_ENGINE, MEMBER_HELLO) ||
        !engine_registry_all(self->registry, MSG_ROLE_FRONTEND, MEMBER_HELLO)) {
        return;
    }
    uint64_t first = next_engine(self, 0)->member_of;
    uint32_t n = engine_registry_engines(self->registry);
    bool same = true, none = true;
    member_t *m;
    for (m = next_engine(self, 0); m != NULL; m = next_engine(self, m->rank + 1)) {
        same &= m->member_of == first && m->members == n;
        none &= m->member_of == 0;
    }
    if (none) {
        form(self);
    } else if (same && self->epoch == 0) {
        adopt(self, first);
    } else {
        dissolve_found(self);
    }
}

/* ---- HELLO ---- */

static lk_status_t check_life(const member_t *m, const msg_t *msg, lk_error_t *err)
{
    const char *name = member_role_name(m->role);
    if (msg->generation <= m->expelled) {
        return lk_error_set(err, LK_ERR_STATE, "%s %u, process %llu, was expelled: %s", name,
                            m->rank, (unsigned long long)msg->hello.pid, m->expelled_why);
    }
    if (msg->generation < m->generation) {
        return lk_error_set(err, LK_ERR_STATE, "%s %u was replaced by generation %llu", name,
                            m->rank, (unsigned long long)m->generation);
    }
    if (msg->generation == m->generation && m->pid != msg->hello.pid) {
        return lk_error_set(err, LK_ERR_STATE,
                            "%s %u has said HELLO already (generation %llu, process %llu)", name,
                            m->rank, (unsigned long long)m->generation, (unsigned long long)m->pid);
    }
    return LK_OK;
}

static bool is_repeated(const membership_t *self, const member_t *m, const msg_t *msg)
{
    const msg_hello_t *h = &msg->hello;
    bool entered = is_in_epoch(m) && h->member_of == self->epoch;
    bool moved = h->member_of != m->member_of && !entered;
    /* it has never heard of the epoch that broke, and can't leave it */
    bool waits = m->state == MEMBER_NEW && h->member_of == 0 && h->heard_epoch < self->epoch;
    bool news = m->role == MSG_ROLE_ENGINE && (moved || waits);
    return !news && msg->generation == m->generation &&
           strcmp(m->mesh, msg_cstr(h->mesh_address)) == 0 &&
           strcmp(m->input, msg_cstr(h->input_address)) == 0;
}

static void record(member_t *m, const msg_t *msg, uint64_t now_ns)
{
    const msg_hello_t *h = &msg->hello;
    snprintf(m->input, sizeof m->input, "%s", msg_cstr(h->input_address));
    snprintf(m->output, sizeof m->output, "%s", msg_cstr(h->output_address));
    snprintf(m->mesh, sizeof m->mesh, "%s", msg_cstr(h->mesh_address));
    m->generation = msg->generation;
    m->pid = h->pid;
    m->member_of = h->member_of;
    m->members = h->members;
    m->ready_for = 0;
    m->last_heard_ns = now_ns;
    m->quiet_until_ns = 0;
    m->dead = false;
    m->state = MEMBER_HELLO;
}

/* What whoever survived knows of epochs, so that none is used again after the death of all others,
 * this coordinator's earlier lives included. */
static void remember(membership_t *self, const msg_hello_t *h)
{
    uint64_t heard = LK_MAX(h->heard_epoch, LK_MAX(h->left_epoch, h->member_of));
    self->newest_left = LK_MAX(self->newest_left, heard);
    membership_note_weights(self, h->weight_epoch);
}

static void on_engine(membership_t *self, member_t *m, const msg_t *msg, uint64_t now_ns)
{
    const msg_hello_t *h = &msg->hello;
    char why[LK_ERROR_TEXT_MAX];
    bool new_life = msg->generation > m->generation, was_in = is_in_epoch(m);
    if (new_life && m->generation != 0) {
        snprintf(why, sizeof why, "engine %u has ended and was started again", m->rank);
        member_expel(m, why);
    } else {
        lk_text(why, sizeof why, "engine %u left: %s", m->rank, msg_cstr(h->why));
    }
    if (self->epoch > 0 && (was_in || h->left_epoch == self->epoch)) {
        break_epoch(self, new_life ? (int64_t)m->rank : -1, why, now_ns);
    }
    self->breaks = new_life && m->generation != 0 ? 0 : self->breaks; /* it was a death */
    record(m, msg, now_ns);
    remember(self, h);
    try_form(self);
}

static void on_frontend(membership_t *self, member_t *m, const msg_t *msg, uint64_t now_ns)
{
    record(m, msg, now_ns);
    remember(self, &msg->hello);
    if (self->epoch == 0) {
        try_form(self);
        return;
    }
    m->state = MEMBER_INITED;
    self->ops.init(self->ops.ctx, m);
    init_engines(self); /* they learn where it is now */
}

/* It has not received, or not yet, what we said to the last one. */
static void say_again(membership_t *self, member_t *m, uint64_t revision)
{
    bool engine = m->role == MSG_ROLE_ENGINE;
    if (engine && m->state == MEMBER_NEW) {
        self->ops.dissolve(self->ops.ctx, LK_MAX(self->epoch, self->newest_left), -1, self->cause);
    } else if (is_in_epoch(m) &&
               !(engine && m->state == MEMBER_READY && revision == self->revision)) {
        self->ops.init(self->ops.ctx, m);
    }
}

lk_status_t membership_hello(membership_t *self, const msg_t *msg, uint64_t now_ns, lk_error_t *err)
{
    member_t *m = NULL;
    LK_RETURN_IF_ERROR(engine_registry_check_hello(self->registry, msg, &m, err));
    LK_RETURN_IF_ERROR(check_life(m, msg, err));
    if (is_repeated(self, m, msg)) {
        m->last_heard_ns = now_ns;
        remember(self, &msg->hello);
        say_again(self, m, msg->hello.revision);
        return LK_OK;
    }
    if (m->role == MSG_ROLE_ENGINE) {
        on_engine(self, m, msg, now_ns);
    } else {
        on_frontend(self, m, msg, now_ns);
    }
    return LK_OK;
}

/* ---- removal ---- */

bool membership_remove(membership_t *self, uint64_t rank, const char *why, uint64_t now_ns)
{
    member_t *m = engine_registry_find(self->registry, MSG_ROLE_ENGINE, rank);
    if (m == NULL || (!m->removed && engine_registry_engines(self->registry) == 1)) {
        return false;
    }
    lk_text(m->removed_why, sizeof m->removed_why, "%s", why);
    if (m->removed) {
        return true;
    }
    char text[LK_ERROR_TEXT_MAX];
    lk_text(text, sizeof text, "engine %u was removed: %s", m->rank, why);
    LK_WARN("%s", text);
    bool in_epoch = is_in_epoch(m), alone = m->member_of != 0 && !in_epoch;
    member_expel(m, text);
    m->removed = true;
    m->dead = false;
    if (in_epoch) {
        break_epoch(self, m->rank, text, now_ns);
    } else if (alone && self->state == MEMBERSHIP_GATHERING) {
        dissolve_found(self); /* the others of that group may not know yet that it is over */
        lk_text(self->cause, sizeof self->cause, "%s", text);
    }
    try_form(self);
    return true;
}

/* ---- READY ---- */

static void take_facts(member_t *m, const msg_ready_t *r, uint64_t now_ns)
{
    m->num_blocks = r->num_blocks;
    m->max_model_len = r->max_model_len;
    m->vocab_size = r->vocab_size;
    m->lockstep = r->lockstep;
    snprintf(m->dtype, sizeof m->dtype, "%s", msg_cstr(r->dtype));
    snprintf(m->digest, sizeof m->digest, "%s", msg_cstr(r->digest));
    m->last_heard_ns = now_ns;
    m->ready_for = r->group_epoch;
}

lk_status_t membership_ready(membership_t *self, const msg_t *msg, uint64_t now_ns, lk_error_t *err)
{
    CHECK(msg->type == MSG_READY);
    const msg_ready_t *r = &msg->ready;
    member_t *m = engine_registry_find(self->registry, (uint32_t)r->role, r->rank);
    bool engine = r->role == MSG_ROLE_ENGINE;
    if (m == NULL || msg->generation != m->generation || m->state == MEMBER_NEW ||
        (engine && m->state == MEMBER_HELLO && m->member_of == 0)) {
        return lk_error_set(err, LK_ERR_STATE,
                            "READY of %s %llu, which has not been through HELLO and INIT",
                            member_role_name((uint32_t)r->role), (unsigned long long)r->rank);
    }
    bool gathers = engine && m->state == MEMBER_HELLO; /* of a group that may be adopted */
    if (engine && r->group_epoch != (gathers ? m->member_of : self->epoch)) {
        return lk_error_set(err, LK_ERR_STATE,
                            "READY of engine %u is of group epoch %llu, not %llu", m->rank,
                            (unsigned long long)r->group_epoch, (unsigned long long)self->epoch);
    }
    take_facts(m, r, now_ns);
    m->state = gathers ? m->state : MEMBER_READY;
    if (self->state == MEMBERSHIP_CONNECTING &&
        engine_registry_all(self->registry, MSG_ROLE_ENGINE, MEMBER_READY)) {
        self->state = MEMBERSHIP_SERVING;
        self->serving_since_ns = now_ns;
    }
    return LK_OK;
}

void membership_note_weights(membership_t *self, uint64_t weight_epoch)
{
    self->newest_weights = LK_MAX(self->newest_weights, weight_epoch);
}

void membership_note_epoch(membership_t *self, uint64_t group_epoch, uint64_t now_ns)
{
    char why[LK_ERROR_TEXT_MAX];
    self->newest_left = LK_MAX(self->newest_left, group_epoch);
    if (group_epoch > self->epoch && self->state != MEMBERSHIP_GATHERING) {
        snprintf(why, sizeof why, "a front end has heard of group epoch %llu",
                 (unsigned long long)group_epoch);
        break_epoch(self, -1, why, now_ns);
    }
}

/* ---- silence ---- */

static bool expire(membership_t *self, member_t *m, uint64_t now_ns, uint64_t limit_ns)
{
    uint64_t silence_ns = now_ns - m->last_heard_ns;
    bool nearly = silence_ns > limit_ns / 2 && self->ops.computes != NULL;
    bool patient = nearly && self->ops.computes(self->ops.ctx, m, now_ns) &&
                   silence_ns < CPU_WATCH_PATIENCE * limit_ns;
    bool silent = silence_ns > limit_ns && now_ns > m->quiet_until_ns && !patient;
    if (m->dead || m->state == MEMBER_NEW || !silent) {
        return false;
    }
    char why[128];
    snprintf(why, sizeof why, "silent for %.1f s", (double)(now_ns - m->last_heard_ns) / 1e9);
    if (m->role != MSG_ROLE_ENGINE) {
        m->dead = m->state == MEMBER_READY; /* before that it may take long to start */
        snprintf(m->expelled_why, sizeof m->expelled_why, "%s", why);
        return m->dead;
    }
    bool in_epoch = is_in_epoch(m);
    member_expel(m, why);
    m->dead = true;
    if (in_epoch) {
        char text[LK_ERROR_TEXT_MAX];
        lk_text(text, sizeof text, "engine %u: %s", m->rank, why);
        break_epoch(self, m->rank, text, now_ns);
    } else if (m->member_of != 0 && self->state == MEMBERSHIP_GATHERING) {
        /* It may wake up in the group that it said it is in, and would never say HELLO again. */
        dissolve_found(self);
    }
    return true;
}

bool membership_expire(membership_t *self, uint64_t now_ns, uint64_t limit_ns)
{
    bool changed = false;
    for (size_t i = 0; i < engine_registry_count(self->registry); i++) {
        changed |= expire(self, engine_registry_at(self->registry, i), now_ns, limit_ns);
    }
    return changed;
}

/* ---- state ---- */

membership_state_t membership_state(const membership_t *self)
{
    return self->state;
}

uint64_t membership_epoch(const membership_t *self)
{
    return self->epoch;
}

uint64_t membership_revision(const membership_t *self)
{
    return self->revision;
}

bool membership_adopted(const membership_t *self)
{
    return self->adopted;
}

uint64_t membership_weight_floor(const membership_t *self)
{
    return self->floor;
}

uint64_t membership_weights(const membership_t *self)
{
    return self->newest_weights;
}

const char *membership_cause(const membership_t *self)
{
    return self->cause;
}

lk_status_t membership_check(const membership_t *self, lk_error_t *err)
{
    return self->breaks <= MEMBERSHIP_MAX_BREAKS
               ? LK_OK
               : lk_error_set(err, LK_ERR_INTERNAL,
                              "group epochs break again and again though no process dies: %s",
                              self->cause);
}
