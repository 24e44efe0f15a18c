#include "tests/model/guards.h"
#include "base/check.h"
#include "engine_core/dp/group_internal.h"

#include <stdio.h>
#include <stdlib.h>

#define MAX_F 2

/* in the row's order */
#define FIELDS(X)                                                                                  \
    X(kind)                                                                                        \
    X(n)                                                                                           \
    X(f)                                                                                           \
    X(lockstep) X(shadow) X(interval) X(run) X(more) X(sc) X(pause) X(phase) X(ended)              \
        X(voted_ended) X(gates) X(session) X(posted) X(wait) X(rem) X(voted_quiet) X(expired)      \
            X(voted_expired) X(joins)

typedef struct {
#define X(name) long name;
    FIELDS(X)
#undef X
    long heard[MAX_F], voted_life[MAX_F], seen[MAX_F], voted[MAX_F], next;
} row_t;

static long next_number(const char **at)
{
    char *end;
    long value = strtol(*at, &end, 10);
    CHECKF(end != *at, "a row is too short");
    *at = end;
    return value;
}

static row_t read_row(const char *at)
{
    row_t r = {0};
#define X(name) r.name = next_number(&at);
    FIELDS(X)
#undef X
    CHECK(r.f >= 1 && r.f <= MAX_F);
    for (long f = 0; f < r.f; f++) {
        r.heard[f] = next_number(&at);
        r.voted_life[f] = next_number(&at);
        r.seen[f] = next_number(&at);
        r.voted[f] = next_number(&at);
    }
    r.next = next_number(&at);
    return r;
}

static lk_status_t check_nothing(void *ctx, update_verb_t verb, const char *spec, size_t spec_len,
                                 lk_error_t *err)
{
    return LK_OK;
}

static group_t *make_group(const row_t *r)
{
    group_t *g = group_new(&(group_config_t){.size = (uint32_t)r->n,
                                             .n_frontends = (uint32_t)r->f,
                                             .group_epoch = 1,
                                             .sync_interval = (uint32_t)r->interval,
                                             .lockstep = r->lockstep && r->n > 1,
                                             .shadow = r->shadow,
                                             .doorbell = true,
                                             .check = check_nothing});
    CHECK(g != NULL);
    g->run = r->run;
    g->more = r->more;
    g->sc = (uint32_t)r->sc;
    g->pause.state = (pause_state_t)r->pause;
    g->update.phase = (update_phase_t)r->phase;
    g->update.ended = r->ended;
    g->update.voted_ended = r->voted_ended;
    g->weights.gates = (unsigned)r->gates;
    g->weights.session = r->session;
    g->posted = r->posted;
    g->voted_quiet = r->voted_quiet;
    g->voted_expired = r->voted_expired;
    for (long f = 0; f < r->f; f++) {
        g->streams[f].generation = (uint64_t)r->heard[f];
        g->streams[f].voted_generation = (uint64_t)r->voted_life[f];
        g->streams[f].seen = (uint64_t)r->seen[f];
        g->streams[f].voted_seen = (uint64_t)r->voted[f];
    }
    return g;
}

bool guards_repeat(const char *row)
{
    static const char *const names[] = {"waits", "votes", "steps"};
    row_t r = read_row(row);
    group_t *g = make_group(&r);
    group_view_t view = {.work = r.wait + r.rem > 0,
                         .quiet = r.rem == 0,
                         .expired = r.expired,
                         .peer_waiting = r.joins};
    group_next_t next = group_next(g, &view);
    long code = next == GROUP_VOTE ? 1 : next == GROUP_STEP ? 2 : 0;
    /* an independent rank that may step does so when there is something to step with */
    bool runnable = r.rem > 0 || (r.wait > 0 && r.pause == PAUSE_STATE_RUNNING);
    code = code == 2 && !g->config.lockstep && !runnable ? 0 : code;
    group_destroy(&g);
    CHECK(r.next >= 0 && r.next <= 2);
    if (code != r.next) {
        printf("# the model %s, the code %s\n", names[r.next], names[code]);
    }
    return code == r.next;
}
