/*
 * conformance.c ROWS...: repeats decisions of the models (record.h) with the real group: brings one
 * into the recorded state, gives it the recorded commands and the result of the vote, and
 * compares the state after it and the actions, in order. Rows that begin with 0 are guards.c's,
 * with -1 members.c's.
 */
#include "base/check.h"
#include "base/log.h"
#include "engine_core/dp/group_internal.h"
#include "tests/model/guards.h"
#include "tests/model/members.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_F       2
#define MAX_ACTIONS 64
#define MAX_OPS     16

/* outcomes of an answer, as in group.pml */
enum { OUT_OK = 1, OUT_SUPERSEDED, OUT_FAILED, OUT_ORDER };

typedef struct {
    long run, pause, sole, calls, more, phase, committing, update, gates, session, configured;
    long weights, done[MAX_F], life[MAX_F];
} state_t;

typedef struct {
    long act, call, outcome;
} act_t;

typedef struct {
    long n, f, c, lockstep, shadow, me;
    state_t before, after;
    long result, verdict, ended, verb, idle, quiet, expired, clean, content, most;
    long gen[MAX_F], top[MAX_F], seen[MAX_F], ok[MAX_F], n_ops[MAX_F], ops[MAX_F][MAX_OPS];
    long n_actions;
    act_t actions[MAX_ACTIONS];
} row_t;

/* ---- reading ---- */

static long next_number(char **at)
{
    char *end;
    long value = strtol(*at, &end, 10);
    CHECKF(end != *at, "a row is too short");
    *at = end;
    return value;
}

static void read_state(state_t *s, long frontends, char **at)
{
    long *fields[] = {&s->run,   &s->pause,   &s->sole,       &s->calls,
                      &s->more,  &s->phase,   &s->committing, &s->update,
                      &s->gates, &s->session, &s->configured, &s->weights};
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        *fields[i] = next_number(at);
    }
    for (long f = 0; f < frontends; f++) {
        s->done[f] = next_number(at);
        s->life[f] = next_number(at);
    }
}

static void read_row(row_t *r, char *at)
{
    memset(r, 0, sizeof *r);
    long *head[] = {&r->n, &r->f, &r->c, &r->lockstep, &r->shadow, &r->me};
    for (size_t i = 0; i < sizeof head / sizeof *head; i++) {
        *head[i] = next_number(&at);
    }
    CHECK(r->f >= 1 && r->f <= MAX_F);
    read_state(&r->before, r->f, &at);
    long *votes[] = {&r->result, &r->verdict, &r->ended, &r->verb,    &r->idle,
                     &r->quiet,  &r->expired, &r->clean, &r->content, &r->most};
    for (size_t i = 0; i < sizeof votes / sizeof *votes; i++) {
        *votes[i] = next_number(&at);
    }
    for (long f = 0; f < r->f; f++) {
        r->gen[f] = next_number(&at);
        r->top[f] = next_number(&at);
        r->seen[f] = next_number(&at);
        r->ok[f] = next_number(&at);
        r->n_ops[f] = next_number(&at);
        CHECK(r->n_ops[f] >= 0 && r->n_ops[f] <= MAX_OPS);
        for (long i = 0; i < r->n_ops[f]; i++) {
            r->ops[f][i] = next_number(&at);
        }
    }
    read_state(&r->after, r->f, &at);
    r->n_actions = next_number(&at);
    CHECK(r->n_actions <= MAX_ACTIONS);
    for (long i = 0; i < r->n_actions; i++) {
        r->actions[i].act = next_number(&at);
        r->actions[i].call = next_number(&at);
        r->actions[i].outcome = next_number(&at);
    }
}

/* ---- the group in the recorded state ---- */

static lk_status_t check_nothing(void *ctx, update_verb_t verb, const char *spec, size_t spec_len,
                                 lk_error_t *err)
{
    return LK_OK;
}

static pause_call_t call_of(const row_t *r, long call)
{
    return (pause_call_t){(uint32_t)(call / r->c), 1, (uint64_t)(call % r->c + 1)};
}

static msg_cmd_t command_of(long f, long number, long op)
{
    static const char label[] = "{\"weight_version\": \"v\"}";
    long kind = op & 7, arg = op >> 3;
    bool labelled = kind == CMD_UPDATE && arg == UPDATE_VERB_SET_VERSION;
    return (msg_cmd_t){.client = (uint64_t)f,
                       .generation = 1,
                       .number = (uint64_t)number,
                       .kind = (uint64_t)kind,
                       .mode = kind == CMD_PAUSE ? (uint64_t)arg : 0,
                       .target = kind == CMD_CANCEL ? (uint64_t)arg : 0,
                       .verb = kind == CMD_UPDATE ? (uint64_t)arg : 0,
                       .spec = labelled ? (msg_str_t){label, sizeof label - 1} : msg_str("")};
}

static void set_replicated(group_t *g, const row_t *r)
{
    const state_t *s = &r->before;
    g->run = s->run;
    g->pause.state = (pause_state_t)s->pause;
    g->pause.has_sole = s->sole != 0;
    g->pause.sole = call_of(r, s->sole - (s->sole != 0));
    g->pause.calls = calloc((size_t)(r->f * r->c) + 1, sizeof *g->pause.calls);
    g->pause.cap_calls = (size_t)(r->f * r->c);
    for (long call = 0; call < r->f * r->c; call++) {
        if (s->calls >> call & 1) {
            g->pause.calls[g->pause.n_calls++] = call_of(r, call);
        }
    }
    g->weights.gates = (unsigned)s->gates;
    g->weights.session = s->session;
    g->weights.configured = s->configured;
    g->weights.epoch = g->weights.taken = (uint64_t)s->weights;
    for (long f = 0; f < r->f; f++) {
        g->done[f] = (group_done_t){(uint64_t)s->life[f], (uint64_t)s->done[f]};
    }
    if (s->update != 0) {
        pause_call_t call = call_of(r, s->update - 1);
        g->update = (group_update_t){.phase = (update_phase_t)s->phase,
                                     .committing = s->committing,
                                     .ended = r->ended,
                                     .frontend = call.frontend,
                                     .generation = call.generation,
                                     .number = call.number,
                                     .verb = (update_verb_t)r->verb,
                                     .spec = calloc(1, 1)};
        if (r->result == VOTE_OK + LK_ERR_IO) {
            lk_error_set(&g->update.result, LK_ERR_IO, "as recorded");
        }
    }
}

/* Commands as this rank has received them. */
static void set_streams(group_t *g, const row_t *r)
{
    for (long f = 0; f < r->f; f++) {
        command_stream_t *stream = &g->streams[f];
        long done = r->before.done[f];
        if (done + r->n_ops[f] > 0) {
            stream_follow(stream, 1);
            stream->seen = (uint64_t)done;
        }
        for (long i = 0; i < r->n_ops[f]; i++) {
            msg_cmd_t cmd = command_of(f, done + 1 + i, r->ops[f][i]);
            group_on_cmd(g, &cmd);
            CHECKF((long)stream->seen == done + 1 + i, "the stream refuses command %ld", i);
        }
        if (r->verdict >> f & 1) {
            lk_error_set(&stream->verdict, LK_ERR_IO, "as recorded");
        }
    }
}

static void set_vector(const group_t *g, const row_t *r, uint64_t *v)
{
    v[VEC_IDLE] = (uint64_t)r->idle;
    v[VEC_QUIET] = (uint64_t)r->quiet;
    v[VEC_TAG] = group_hash(g);
    v[VEC_NTAG] = ~v[VEC_TAG];
    for (uint32_t f = 0; f < r->f; f++) {
        v[VEC_GEN(g, f)] = (uint64_t)r->gen[f];
        v[VEC_NGEN(g, f)] = ~(uint64_t)r->top[f];
        v[VEC_SEEN(g, f)] = (uint64_t)r->seen[f];
        v[VEC_OK(g, f)] = (uint64_t)r->ok[f];
        v[VEC_CANCEL(g, f)] = UINT64_MAX;
    }
    v[VEC_EXPIRED(g)] = (uint64_t)r->expired;
    v[VEC_CLEAN(g)] = (uint64_t)r->clean;
    v[VEC_CONTENT(g)] = (uint64_t)r->content;
    v[VEC_NCONTENT(g)] = ~(uint64_t)r->most;
}

/* ---- comparing ---- */

static long outcome_of(const group_action_t *a)
{
    if (a->status == LK_OK) {
        return OUT_OK;
    }
    if (a->kind == CMD_PAUSE) {
        return OUT_SUPERSEDED;
    }
    return a->status == LK_ERR_STATE ? OUT_ORDER : OUT_FAILED;
}

/* What the model knows of an action; false if it has none for it. */
static bool as_model(const row_t *r, const group_action_t *a, act_t *out)
{
    *out = (act_t){.act = a->act};
    switch (a->act) {
    case GROUP_ACT_DONE:
        out->call = (long)a->frontend * r->c + (long)a->number - 1;
        out->outcome = outcome_of(a);
        return true;
    case GROUP_ACT_UPDATE_OUTCOME:
        out->call = (long)a->verb;
        out->outcome = a->ok;
        return true;
    case GROUP_ACT_UPDATE_ENTER:
        out->call = (long)a->verb;
        return true;
    case GROUP_ACT_SEEN:
    case GROUP_ACT_REPORT:
    case GROUP_ACT_ANNOUNCE:
    case GROUP_ACT_CLEAR_CACHE:
        return false;
    default:
        return true;
    }
}

static void read_after(const group_t *g, const row_t *r, state_t *s)
{
    memset(s, 0, sizeof *s);
    s->run = g->run;
    s->pause = g->pause.state;
    s->sole =
        g->pause.has_sole ? (long)g->pause.sole.frontend * r->c + (long)g->pause.sole.number : 0;
    for (size_t i = 0; i < g->pause.n_calls; i++) {
        s->calls |= 1l << (g->pause.calls[i].frontend * r->c + (long)g->pause.calls[i].number - 1);
    }
    s->more = g->more;
    s->phase = g->update.phase;
    s->committing = g->update.committing;
    s->update = g->update.phase != UPDATE_NONE
                    ? (long)g->update.frontend * r->c + (long)g->update.number
                    : 0;
    s->gates = g->weights.gates;
    s->session = g->weights.session;
    s->configured = g->weights.configured;
    s->weights = (long)g->weights.epoch;
    for (long f = 0; f < r->f; f++) {
        s->done[f] = (long)g->done[f].number;
        s->life[f] = (long)g->done[f].generation;
    }
}

static bool same_state(const row_t *r, const state_t *real)
{
    static const char *const names[] = {"run",   "pause",   "sole",       "calls",
                                        "more",  "phase",   "committing", "update",
                                        "gates", "session", "configured", "weights"};
    const long *a = &r->after.run, *b = &real->run;
    bool same = true;
    for (size_t i = 0; i < sizeof *real / sizeof(long); i++) {
        if (a[i] != b[i]) {
            printf("# %s: model %ld, code %ld\n", i < LK_ARRAY_LEN(names) ? names[i] : "done", a[i],
                   b[i]);
            same = false;
        }
    }
    return same;
}

static bool same_actions(const row_t *r, group_t *g)
{
    group_action_t a;
    act_t real;
    long n = 0;
    bool same = true;
    while (group_next_action(g, &a)) {
        if (!as_model(r, &a, &real)) {
            continue;
        }
        const act_t *model = &r->actions[n];
        if (n >= r->n_actions || model->act != real.act || model->call != real.call ||
            model->outcome != real.outcome) {
            printf("# action %ld: code %ld (%ld, %ld)\n", n, real.act, real.call, real.outcome);
            same = false;
        }
        n++;
    }
    if (n != r->n_actions) {
        printf("# the model has %ld actions, the code %ld\n", r->n_actions, n);
    }
    return same && n == r->n_actions;
}

static bool repeat(const row_t *r)
{
    group_t *g = group_new(&(group_config_t){.rank = (uint32_t)r->me,
                                             .size = (uint32_t)r->n,
                                             .n_frontends = (uint32_t)r->f,
                                             .group_epoch = 1,
                                             .sync_interval = 1,
                                             .lockstep = r->lockstep && r->n > 1,
                                             .shadow = r->shadow,
                                             .doorbell = true,
                                             .check = check_nothing});
    CHECK(g != NULL);
    uint64_t v[ALLREDUCE_MAX_LEN];
    set_replicated(g, r);
    set_streams(g, r);
    group_view_t view = {.content = 0};
    group_vote(g, &view, 0, v);
    set_vector(g, r, v);
    group_action_t ignored;
    while (group_next_action(g, &ignored)) {
    }
    lk_error_t err = LK_ERROR_INIT;
    state_t after;
    CHECKF(group_decide(g, v, 0, &err) == LK_OK, "%s", err.text);
    read_after(g, r, &after);
    bool same = same_state(r, &after);
    same = same_actions(r, g) && same;
    group_destroy(&g);
    return same;
}

int main(int argc, char **argv)
{
    lk_log_init("model", LK_LOG_ERROR, LK_LOG_TEXT);
    unsigned long rows = 0, guards = 0, members = 0, differ = 0;
    for (int i = 1; i < argc; i++) {
        FILE *file = fopen(argv[i], "r");
        CHECKF(file != NULL, "%s cannot be read", argv[i]);
        char line[4096];
        while (fgets(line, sizeof line, file) != NULL) {
            bool same;
            if (line[0] == '0') {
                same = guards_repeat(line);
                guards++;
            } else if (line[0] == '-') {
                same = members_repeat(line);
                members++;
            } else {
                row_t row;
                read_row(&row, line);
                same = repeat(&row);
                rows++;
            }
            if (!same) {
                printf("# row: %s", line);
                differ++;
            }
        }
        fclose(file);
    }
    printf("%lu decisions, %lu guards and %lu of the coordinator, %lu differ from the code's\n",
           rows, guards, members, differ);
    return rows + members > 0 && differ == 0 ? 0 : 1;
}
