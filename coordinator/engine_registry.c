#include "coordinator/engine_registry.h"
#include "base/check.h"
#include "base/env.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct engine_registry {
    uint32_t dp_size, n_frontends;
    char config_hash[64];
    member_t members[]; /* engines by rank, then front ends by index */
};

const char *member_role_name(uint32_t role)
{
    switch (role) {
    case MSG_ROLE_COORDINATOR:
        return "coordinator";
    case MSG_ROLE_ENGINE:
        return "engine";
    case MSG_ROLE_FRONTEND:
        return "front end";
    default:
        return "trainer";
    }
}

engine_registry_t *engine_registry_new(uint32_t dp_size, uint32_t n_frontends,
                                       const char *config_hash)
{
    size_t n = (size_t)dp_size + n_frontends;
    engine_registry_t *self = calloc(1, sizeof *self + n * sizeof self->members[0]);
    if (self == NULL) {
        return NULL;
    }
    self->dp_size = dp_size;
    self->n_frontends = n_frontends;
    snprintf(self->config_hash, sizeof self->config_hash, "%s", config_hash);
    for (size_t i = 0; i < n; i++) {
        member_t *m = &self->members[i];
        m->role = i < dp_size ? MSG_ROLE_ENGINE : MSG_ROLE_FRONTEND;
        m->rank = (uint32_t)(i < dp_size ? i : i - dp_size);
    }
    return self;
}

void engine_registry_destroy(engine_registry_t **self_p)
{
    if (self_p != NULL) {
        free(*self_p);
        *self_p = NULL;
    }
}

member_t *engine_registry_find(engine_registry_t *self, uint32_t role, uint64_t rank)
{
    if (role == MSG_ROLE_ENGINE && rank < self->dp_size) {
        return &self->members[rank];
    }
    if (role == MSG_ROLE_FRONTEND && rank < self->n_frontends) {
        return &self->members[self->dp_size + rank];
    }
    return NULL;
}

size_t engine_registry_count(const engine_registry_t *self)
{
    return (size_t)self->dp_size + self->n_frontends;
}

member_t *engine_registry_at(engine_registry_t *self, size_t i)
{
    CHECK(i < engine_registry_count(self));
    return &self->members[i];
}

lk_status_t engine_registry_check_hello(engine_registry_t *self, const msg_t *msg, member_t **out,
                                        lk_error_t *err)
{
    CHECK(msg->type == MSG_HELLO);
    const msg_hello_t *h = &msg->hello;
    member_t *m = engine_registry_find(self, (uint32_t)h->role, h->rank);
    if (m == NULL) {
        return lk_error_set(err, LK_ERR_INVALID,
                            "HELLO of %s %llu, but this cluster has %u engines and %u front ends",
                            member_role_name((uint32_t)h->role), (unsigned long long)h->rank,
                            self->dp_size, self->n_frontends);
    }
    if (m->removed) {
        return lk_error_set(err, LK_ERR_STATE,
                            "engine %u was removed from the cluster (%s) and can not come back",
                            m->rank, m->removed_why);
    }
    if (strcmp(msg_cstr(h->config_hash), self->config_hash) != 0) {
        return lk_error_set(
            err, LK_ERR_INVALID,
            "%s %u was started with other flags than the coordinator (configuration "
            "hash %s, not %s)",
            member_role_name(m->role), m->rank, msg_cstr(h->config_hash), self->config_hash);
    }
    if (h->input_address.len >= sizeof m->input || h->output_address.len >= sizeof m->output ||
        h->mesh_address.len >= sizeof m->mesh) {
        return lk_error_set(err, LK_ERR_INVALID, "an address in the HELLO of %s %u is too long",
                            member_role_name(m->role), m->rank);
    }
    *out = m;
    return LK_OK;
}

void member_expel(member_t *m, const char *why)
{
    m->expelled = m->generation;
    lk_text(m->expelled_why, sizeof m->expelled_why, "%s", why);
    m->state = MEMBER_NEW;
}

bool engine_registry_heard(engine_registry_t *self, const msg_t *msg, uint64_t now_ns, bool *back)
{
    member_t *m = engine_registry_find(self, msg->sender_role, msg->sender_rank);
    *back = false;
    if (m == NULL || msg->generation != m->generation || msg->generation <= m->expelled) {
        return false;
    }
    m->last_heard_ns = now_ns;
    if (msg->type == MSG_HEARTBEAT) {
        uint64_t ms = LK_MIN(msg->heartbeat.silence_ms, 3600000u);
        m->quiet_until_ns = ms > 0 ? now_ns + ms * LK_MS_NS : 0;
    }
    *back = m->dead && m->role != MSG_ROLE_ENGINE;
    m->dead &= m->role == MSG_ROLE_ENGINE;
    return true;
}

void engine_registry_forgive(engine_registry_t *self, uint64_t now_ns)
{
    for (size_t i = 0; i < engine_registry_count(self); i++) {
        self->members[i].last_heard_ns = now_ns;
    }
}

uint32_t engine_registry_engines(const engine_registry_t *self)
{
    uint32_t n = 0;
    for (uint32_t r = 0; r < self->dp_size; r++) {
        n += !self->members[r].removed;
    }
    return n;
}

bool engine_registry_all(const engine_registry_t *self, uint32_t role, member_state_t state)
{
    for (size_t i = 0; i < engine_registry_count(self); i++) {
        const member_t *m = &self->members[i];
        if (m->role == role && !m->removed && m->state < state) {
            return false;
        }
    }
    return true;
}

void engine_registry_missing(const engine_registry_t *self, member_state_t state, char *out,
                             size_t room)
{
    size_t n = 0;
    out[0] = '\0';
    for (size_t i = 0; i < engine_registry_count(self) && n + 32 < room; i++) {
        const member_t *m = &self->members[i];
        if (!m->removed && m->state < state) {
            n += (size_t)snprintf(out + n, room - n, "%s%s %u", n > 0 ? ", " : "",
                                  member_role_name(m->role), m->rank);
        }
    }
}
