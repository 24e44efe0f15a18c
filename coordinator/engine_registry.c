#include "coordinator/engine_registry.h"
#include "base/check.h"

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

/* Copies a wire string into a fixed field; false if it does not fit. */
static bool copy_str(char *out, size_t room, msg_str_t s)
{
    if (s.len >= room) {
        return false;
    }
    memcpy(out, msg_cstr(s), s.len);
    out[s.len] = '\0';
    return true;
}

lk_status_t engine_registry_hello(engine_registry_t *self, const msg_t *msg, uint64_t now_ns,
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
    if (strcmp(msg_cstr(h->config_hash), self->config_hash) != 0) {
        return lk_error_set(
            err, LK_ERR_INVALID,
            "%s %u was started with other flags than the coordinator (configuration "
            "hash %s, not %s)",
            member_role_name(m->role), m->rank, msg_cstr(h->config_hash), self->config_hash);
    }
    if (m->state != MEMBER_NEW && msg->generation <= m->generation) {
        return lk_error_set(err, LK_ERR_STATE, "%s %u has said HELLO already (generation %llu)",
                            member_role_name(m->role), m->rank, (unsigned long long)m->generation);
    }
    if (m->state != MEMBER_NEW) {
        return lk_error_set(
            err, LK_ERR_STATE,
            "%s %u came back as generation %llu; a running group does not take it in again",
            member_role_name(m->role), m->rank, (unsigned long long)msg->generation);
    }
    char input[sizeof m->input], output[sizeof m->output], mesh[sizeof m->mesh];
    if (!copy_str(input, sizeof input, h->input_address) ||
        !copy_str(output, sizeof output, h->output_address) ||
        !copy_str(mesh, sizeof mesh, h->mesh_address)) {
        return lk_error_set(err, LK_ERR_INVALID, "an address in the HELLO of %s %u is too long",
                            member_role_name(m->role), m->rank);
    }
    memcpy(m->input, input, sizeof input);
    memcpy(m->output, output, sizeof output);
    memcpy(m->mesh, mesh, sizeof mesh);
    m->generation = msg->generation;
    m->last_heard_ns = now_ns;
    m->state = MEMBER_HELLO;
    return LK_OK;
}

lk_status_t engine_registry_ready(engine_registry_t *self, const msg_t *msg, uint64_t now_ns,
                                  lk_error_t *err)
{
    CHECK(msg->type == MSG_READY);
    const msg_ready_t *r = &msg->ready;
    member_t *m = engine_registry_find(self, (uint32_t)r->role, r->rank);
    if (m == NULL || m->state != MEMBER_INITED) {
        return lk_error_set(err, LK_ERR_STATE,
                            "READY of %s %llu, which has not been through HELLO and INIT",
                            member_role_name((uint32_t)r->role), (unsigned long long)r->rank);
    }
    m->num_blocks = r->num_blocks;
    m->max_model_len = r->max_model_len;
    m->vocab_size = r->vocab_size;
    snprintf(m->dtype, sizeof m->dtype, "%s", msg_cstr(r->dtype));
    snprintf(m->digest, sizeof m->digest, "%s", msg_cstr(r->digest));
    m->last_heard_ns = now_ns;
    m->state = MEMBER_READY;
    return LK_OK;
}

bool engine_registry_heard(engine_registry_t *self, uint32_t role, uint64_t rank, uint64_t now_ns)
{
    member_t *m = engine_registry_find(self, role, rank);
    if (m == NULL) {
        return false;
    }
    m->last_heard_ns = now_ns;
    bool was_dead = m->dead;
    m->dead = false;
    return was_dead;
}

bool engine_registry_expire(engine_registry_t *self, uint64_t now_ns, uint64_t limit_ns)
{
    bool changed = false;
    for (size_t i = 0; i < engine_registry_count(self); i++) {
        member_t *m = &self->members[i];
        /* While a member loads its model it is silent; the handshake has a deadline of its own. */
        if (m->state == MEMBER_READY && !m->dead && now_ns - m->last_heard_ns > limit_ns) {
            m->dead = true;
            changed = true;
        }
    }
    return changed;
}

bool engine_registry_all(const engine_registry_t *self, uint32_t role, member_state_t state)
{
    for (size_t i = 0; i < engine_registry_count(self); i++) {
        if (self->members[i].role == role && self->members[i].state < state) {
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
        if (m->state < state) {
            n += (size_t)snprintf(out + n, room - n, "%s%s %u", n > 0 ? ", " : "",
                                  member_role_name(m->role), m->rank);
        }
    }
}
