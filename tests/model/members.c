#include "tests/model/members.h"
#include "base/check.h"
#include "base/env.h"

/* The state that a row begins with can be reached by no call: it is written. */
#include "coordinator/membership.c"

#define MAX_N       3
#define MAX_ACTIONS 32
#define LIMIT_NS    LK_SECOND_NS

enum { ON_HELLO = 1, ON_READY, ON_SILENCE, ON_REMOVAL, ON_FRONTEND };
enum { ACT_INIT = 1, ACT_DISSOLVE, ACT_REFUSE };

#define STATE_TABLE(X)                                                                             \
    X(phase) X(epoch) X(newest) X(newest_left) X(revision) X(said) X(removed) X(floor)
#define RANK_TABLE(X)                                                                              \
    X(state) X(generation) X(address) X(member_of) X(members) X(ready_for) X(expelled)

typedef struct {
#define X(name) long name;
    STATE_TABLE(X)
    struct {
        RANK_TABLE(X)
    } ranks[MAX_N];
#undef X
} coordinator_state_t;

typedef struct {
    long act, x;
} act_t;

typedef struct {
    long n, kind, rank, a[8], members, known, known_weights;
    coordinator_state_t before, after;
    long n_actions;
    act_t actions[MAX_ACTIONS];
} row_t;

/* What the real one did. */
typedef struct {
    long n;
    act_t actions[MAX_ACTIONS];
} log_t;

/* ---- reading ---- */

static long next_number(const char **at)
{
    char *end;
    long value = strtol(*at, &end, 10);
    CHECKF(end != *at, "a row is too short");
    *at = end;
    return value;
}

static void read_state(coordinator_state_t *s, long n, const char **at)
{
#define X(name) s->name = next_number(at);
    STATE_TABLE(X)
#undef X
    for (long r = 0; r < n; r++) {
#define X(name) s->ranks[r].name = next_number(at);
        RANK_TABLE(X)
#undef X
    }
}

static row_t read_row(const char *at)
{
    row_t r = {0};
    CHECK(next_number(&at) == -1);
    r.n = next_number(&at);
    CHECK(r.n >= 1 && r.n <= MAX_N);
    r.kind = next_number(&at);
    r.rank = next_number(&at);
    for (int i = 1; i <= 7; i++) {
        r.a[i] = next_number(&at);
    }
    r.members = next_number(&at);
    r.known = next_number(&at);
    r.known_weights = next_number(&at);
    read_state(&r.before, r.n, &at);
    read_state(&r.after, r.n, &at);
    r.n_actions = next_number(&at);
    CHECK(r.n_actions >= 0 && r.n_actions <= MAX_ACTIONS);
    for (long i = 0; i < r.n_actions; i++) {
        r.actions[i] = (act_t){next_number(&at), next_number(&at)};
        next_number(&at);
    }
    return r;
}

/* ---- the coordinator in the recorded state ---- */

static void say(log_t *log, long act, long x)
{
    CHECK(log->n < MAX_ACTIONS);
    log->actions[log->n++] = (act_t){act, x};
}

static void on_init(void *ctx, const member_t *to)
{
    if (to->role == MSG_ROLE_ENGINE) { /* front ends are told too, which the model leaves out */
        say(ctx, ACT_INIT, (long)to->rank);
    }
}

static void on_dissolve(void *ctx, uint64_t epoch, int64_t lost, const char *why)
{
    say(ctx, ACT_DISSOLVE, (long)epoch);
}

static long size_of(long mask)
{
    return __builtin_popcountl((unsigned long)mask);
}

/* 0: none yet */
static void write_address(char *out, size_t room, long address)
{
    out[0] = '\0';
    if (address != 0) {
        snprintf(out, room, "%ld", address);
    }
}

static void set_state(membership_t *m, const row_t *r, uint64_t now_ns)
{
    const coordinator_state_t *s = &r->before;
    m->state = (membership_state_t)s->phase;
    m->epoch = (uint64_t)s->epoch;
    m->newest_weights = (uint64_t)s->newest;
    m->newest_left = (uint64_t)s->newest_left;
    m->revision = (uint64_t)s->revision;
    m->floor = (uint64_t)s->floor;
    for (long i = 0; i < r->n; i++) {
        member_t *member = engine_at(m, (uint32_t)i);
        member->state = (member_state_t)s->ranks[i].state;
        member->generation = member->pid = (uint64_t)s->ranks[i].generation;
        write_address(member->mesh, sizeof member->mesh, s->ranks[i].address);
        member->member_of = (uint64_t)s->ranks[i].member_of;
        member->members = member->member_of == 0 ? 0 : (uint32_t)size_of(s->ranks[i].members);
        member->ready_for = (uint64_t)s->ranks[i].ready_for;
        member->expelled = (uint64_t)s->ranks[i].expelled;
        member->removed = s->removed >> i & 1;
        member->last_heard_ns = now_ns;
    }
    member_t *front = engine_registry_find(m->registry, MSG_ROLE_FRONTEND, 0);
    front->state = s->said == 0 ? MEMBER_NEW : s->epoch > 0 ? MEMBER_INITED : MEMBER_HELLO;
    front->generation = front->pid = s->said != 0;
    front->last_heard_ns = now_ns;
}

/* ---- events ---- */

static void send_hello(membership_t *m, const row_t *r, log_t *log, uint64_t now_ns)
{
    lk_error_t err = LK_ERROR_INIT;
    char mesh[32];
    write_address(mesh, sizeof mesh, r->a[2]);
    msg_t msg = {.type = MSG_HELLO, .generation = (uint64_t)r->a[1]};
    msg.hello = (msg_hello_t){.role = MSG_ROLE_ENGINE,
                              .rank = (uint64_t)r->rank,
                              .pid = (uint64_t)r->a[1],
                              .config_hash = msg_str("model"),
                              .mesh_address = msg_str(mesh),
                              .left_epoch = (uint64_t)r->a[3],
                              .member_of = (uint64_t)r->a[4],
                              .members = r->a[4] == 0 ? 0 : (uint64_t)size_of(r->members),
                              .heard_epoch = (uint64_t)r->a[5],
                              .weight_epoch = (uint64_t)r->a[6],
                              .revision = (uint64_t)r->a[7]};
    if (membership_hello(m, &msg, now_ns, &err) < 0) {
        say(log, ACT_REFUSE, r->rank);
    }
}

static void send_ready(membership_t *m, const row_t *r, uint64_t now_ns)
{
    lk_error_t err;
    msg_t msg = {.type = MSG_READY, .generation = (uint64_t)r->a[2]};
    msg.ready = (msg_ready_t){
        .role = MSG_ROLE_ENGINE, .rank = (uint64_t)r->rank, .group_epoch = (uint64_t)r->a[1]};
    (void)!membership_ready(m, &msg, now_ns, &err); /* of another epoch: nothing happens */
}

static void hear_frontend(membership_t *m, const row_t *r, uint64_t now_ns)
{
    if (r->before.said != 0) {
        membership_note_weights(m, (uint64_t)r->known_weights);
        membership_note_epoch(m, (uint64_t)r->known, now_ns);
        return;
    }
    lk_error_t err = LK_ERROR_INIT;
    msg_t msg = {.type = MSG_HELLO, .generation = 1};
    msg.hello = (msg_hello_t){.role = MSG_ROLE_FRONTEND,
                              .pid = 1,
                              .config_hash = msg_str("model"),
                              .member_of = (uint64_t)r->known,
                              .weight_epoch = (uint64_t)r->known_weights};
    lk_status_t status = membership_hello(m, &msg, now_ns, &err);
    CHECKF(status == LK_OK, "%s", err.text);
}

static void happen(membership_t *m, const row_t *r, log_t *log, uint64_t now_ns)
{
    switch (r->kind) {
    case ON_HELLO:
        send_hello(m, r, log, now_ns);
        break;
    case ON_READY:
        send_ready(m, r, now_ns);
        break;
    case ON_SILENCE:
        engine_at(m, (uint32_t)r->rank)->last_heard_ns = now_ns - 2 * LIMIT_NS;
        membership_expire(m, now_ns, LIMIT_NS);
        break;
    case ON_REMOVAL:
        membership_remove(m, (uint64_t)r->rank, "as recorded", now_ns);
        break;
    default:
        CHECK(r->kind == ON_FRONTEND);
        hear_frontend(m, r, now_ns);
    }
}

/* ---- comparing ---- */

static bool is_same(const char *name, long rank, long model, long code)
{
    if (model != code) {
        printf("# %s of %ld: model %ld, code %ld\n", name, rank, model, code);
    }
    return model == code;
}

static bool same_state(const membership_t *m, const row_t *r)
{
    const coordinator_state_t *s = &r->after;
    bool same = is_same("phase", -1, s->phase, m->state) &
                is_same("epoch", -1, s->epoch, (long)m->epoch) &
                is_same("newest weights", -1, s->newest, (long)m->newest_weights) &
                is_same("newest epoch", -1, s->newest_left, (long)m->newest_left) &
                is_same("revision", -1, s->revision, (long)m->revision) &
                (m->adopted || is_same("floor", -1, s->floor, (long)m->floor));
    for (long i = 0; i < r->n; i++) {
        const member_t *member = engine_at(m, (uint32_t)i);
        char address[32];
        write_address(address, sizeof address, s->ranks[i].address);
        same &= is_same("state", i, s->ranks[i].state, (long)member->state) &
                is_same("life", i, s->ranks[i].generation, (long)member->generation) &
                is_same("address", i, 0, strcmp(member->mesh, address)) &
                is_same("member of", i, s->ranks[i].member_of, (long)member->member_of) &
                is_same("ready for", i, s->ranks[i].ready_for, (long)member->ready_for) &
                is_same("expelled", i, s->ranks[i].expelled, (long)member->expelled) &
                is_same("removed", i, s->removed >> i & 1, member->removed);
    }
    return same;
}

static bool same_actions(const row_t *r, const log_t *log)
{
    bool same = r->n_actions == log->n;
    for (long i = 0; same && i < log->n; i++) {
        same = r->actions[i].act == log->actions[i].act && r->actions[i].x == log->actions[i].x;
    }
    for (long i = 0; !same && i < LK_MAX(log->n, r->n_actions); i++) {
        printf("# action %ld: model %ld (%ld), code %ld (%ld)\n", i,
               i < r->n_actions ? r->actions[i].act : 0, i < r->n_actions ? r->actions[i].x : 0,
               i < log->n ? log->actions[i].act : 0, i < log->n ? log->actions[i].x : 0);
    }
    return same;
}

bool members_repeat(const char *row)
{
    row_t r = read_row(row);
    log_t log = {0};
    const uint64_t now_ns = 100 * LK_SECOND_NS;
    engine_registry_t *registry = engine_registry_new((uint32_t)r.n, 1, "model");
    CHECK(registry != NULL);
    membership_ops_t ops = {.ctx = &log, .init = on_init, .dissolve = on_dissolve};
    membership_t *m = membership_new(registry, &ops, 0);
    CHECK(m != NULL);
    set_state(m, &r, now_ns);
    happen(m, &r, &log, now_ns);
    bool same = same_state(m, &r);
    same &= same_actions(&r, &log);
    membership_destroy(&m);
    engine_registry_destroy(&registry);
    return same;
}
