#include "api_frontend/engine_client.h"
#include "api_frontend/cmd_stream.h"
#include "api_frontend/router.h"
#include "api_frontend/utility_calls.h"
#include "base/check.h"
#include "base/log.h"
#include "engine_core/request.h"
#include "proto/msg_track.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct entry {
    struct entry *hash_next, *prev, *next; /* bucket; list of the rank */
    uint64_t handle;
    uint32_t rank;
    engine_output_fn fn;
    void *ctx;
} entry_t;

typedef struct {
    entry_t *head;                        /* open requests */
    char *dead;                           /* why, or NULL */
    char *removed;                        /* why it never comes back, or NULL */
    uint64_t dead_epoch;                  /* of the group when it died */
    uint64_t here_generation, here_epoch; /* of its newest HERE */
    msg_track_t track;                    /* of what it says on the output socket */
    uint64_t left_epoch;                  /* the newest group epoch that it says it left */
    bool reported;
    msg_load_t load; /* newest report; its weight_version is: */
    char version[320];
} rank_t;

struct engine_client {
    engine_client_config_t config;
    engine_client_ops_t ops;
    cmd_stream_t *stream;
    utility_calls_t *utilities;
    router_t router;
    engine_client_info_t info;
    entry_t **buckets;
    size_t n_buckets, n_requests;
    uint64_t next_handle, beat_ns;
    char *closed; /* why control calls, in lockstep also requests, are refused until the group is
                     formed anew; or NULL */
    rank_t ranks[ROUTER_MAX_RANKS];
};

engine_client_t *engine_client_new(const engine_client_config_t *config,
                                   const engine_client_ops_t *ops)
{
    CHECK(config->n_ranks > 0 && config->n_ranks <= ROUTER_MAX_RANKS);
    engine_client_t *self = calloc(1, sizeof *self);
    if (self == NULL) {
        return NULL;
    }
    self->config = *config;
    self->ops = *ops;
    self->info.n_ranks = self->info.n_members = config->n_ranks;
    self->info.lockstep = config->expert_parallel;
    self->n_buckets = 1024;
    self->buckets = calloc(self->n_buckets, sizeof self->buckets[0]);
    self->stream = cmd_stream_new(&self->config, &self->ops);
    self->utilities = utility_calls_new(&self->config, &self->ops);
    if (self->buckets == NULL || self->stream == NULL || self->utilities == NULL) {
        engine_client_destroy(&self);
        return NULL;
    }
    router_init(&self->router, config->n_ranks, config->client, config->n_clients);
    /* Outputs meant for an earlier life of this front end must not match a request of this one. */
    self->next_handle = (lk_env_random_u64(ops->env) >> 2) + 1;
    return self;
}

void engine_client_destroy(engine_client_t **self_p)
{
    if (self_p == NULL || *self_p == NULL) {
        return;
    }
    engine_client_t *self = *self_p;
    for (uint32_t r = 0; r < self->config.n_ranks; r++) {
        for (entry_t *e = self->ranks[r].head; e != NULL;) {
            entry_t *next = e->next;
            free(e);
            e = next;
        }
        free(self->ranks[r].dead);
        free(self->ranks[r].removed);
    }
    free(self->closed);
    free(self->buckets);
    cmd_stream_destroy(&self->stream);
    utility_calls_destroy(&self->utilities);
    free(self);
    *self_p = NULL;
}

/* ---- request table: handles are consecutive, so their low bits spread them ---- */

static entry_t *find(const engine_client_t *self, uint64_t handle)
{
    entry_t *e = self->buckets[handle & (self->n_buckets - 1)];
    while (e != NULL && e->handle != handle) {
        e = e->hash_next;
    }
    return e;
}

static void grow(engine_client_t *self)
{
    size_t n = self->n_buckets * 2;
    entry_t **buckets = calloc(n, sizeof buckets[0]);
    if (buckets == NULL) {
        return; /* longer chains, still correct */
    }
    for (size_t i = 0; i < self->n_buckets; i++) {
        for (entry_t *e = self->buckets[i]; e != NULL;) {
            entry_t *next = e->hash_next;
            e->hash_next = buckets[e->handle & (n - 1)];
            buckets[e->handle & (n - 1)] = e;
            e = next;
        }
    }
    free(self->buckets);
    self->buckets = buckets;
    self->n_buckets = n;
}

static void insert(engine_client_t *self, entry_t *e)
{
    if (self->n_requests >= self->n_buckets) {
        grow(self);
    }
    entry_t **bucket = &self->buckets[e->handle & (self->n_buckets - 1)];
    e->hash_next = *bucket;
    *bucket = e;
    entry_t **head = &self->ranks[e->rank].head;
    e->prev = NULL;
    e->next = *head;
    if (*head != NULL) {
        (*head)->prev = e;
    }
    *head = e;
    self->n_requests++;
}

/* The caller frees it. */
static void take_out(engine_client_t *self, entry_t *e)
{
    entry_t **p = &self->buckets[e->handle & (self->n_buckets - 1)];
    while (*p != e) {
        p = &(*p)->hash_next;
    }
    *p = e->hash_next;
    if (e->prev != NULL) {
        e->prev->next = e->next;
    } else {
        self->ranks[e->rank].head = e->next;
    }
    if (e->next != NULL) {
        e->next->prev = e->prev;
    }
    self->n_requests--;
    router_done(&self->router, e->rank);
}

size_t engine_client_num_requests(const engine_client_t *self)
{
    return self->n_requests;
}

/* ---- requests ---- */

/* A hint that saves latency when the group is idle; it may be lost. */
static void send_first_req(engine_client_t *self, uint32_t rank)
{
    msg_t msg = {.type = MSG_FIRST_REQ};
    msg.first_req = (msg_first_req_t){.client = self->config.client, .rank = rank};
    if (self->ops.send_coordinator(self->ops.ctx, &msg, NULL) == LK_OK) {
        self->info.run = true; /* the next STATS says what is true */
    }
}

lk_status_t engine_client_add(engine_client_t *self, const engine_request_t *request,
                              engine_output_fn fn, void *ctx, uint64_t *handle, lk_error_t *err)
{
    if (self->n_requests >= self->config.max_requests) {
        return lk_error_set(err, LK_ERR_UNAVAILABLE, "%zu requests are open, which is the limit",
                            self->n_requests);
    }
    if (self->info.lockstep && self->closed != NULL) {
        return lk_error_set(err, LK_ERR_UNAVAILABLE, "%s", self->closed);
    }
    const char *removed = request->rank >= 0 && request->rank < self->config.n_ranks
                              ? self->ranks[request->rank].removed
                              : NULL;
    if (removed != NULL) {
        return lk_error_set(err, LK_ERR_UNAVAILABLE, "%s", removed);
    }
    entry_t *e = calloc(1, sizeof *e);
    if (e == NULL) {
        return lk_error_set(err, LK_ERR_NO_MEMORY, "out of memory");
    }
    lk_status_t status = router_pick(&self->router, request->rank, request->session, &e->rank, err);
    if (status != LK_OK) {
        free(e);
        return status;
    }
    e->handle = self->next_handle++;
    e->fn = fn;
    e->ctx = ctx;
    msg_t msg = {.type = MSG_ADD};
    msg.add = (msg_add_t){
        .client = self->config.client,
        .handle = e->handle,
        .choice = request->choice,
        .id = msg_str(request->id),
        .prompt = {request->prompt, request->n_prompt * sizeof request->prompt[0]},
        .sampling = request->sampling,
        .priority = request->priority,
        .cache_salt = msg_str(request->cache_salt),
        .wave = self->info.wave,
    };
    status = self->ops.send_engine(self->ops.ctx, e->rank, &msg, err);
    if (status != LK_OK) {
        router_done(&self->router, e->rank);
        free(e);
        return status;
    }
    insert(self, e);
    *handle = e->handle;
    if (!self->info.run) {
        send_first_req(self, e->rank);
    }
    return LK_OK;
}

static void send_abort(engine_client_t *self, uint32_t rank, uint64_t handle)
{
    msg_handle_t item = {handle};
    msg_t msg = {.type = MSG_ABORT};
    msg.abort.client = self->config.client;
    msg.abort.handles.items = &item;
    msg.abort.handles.count = 1;
    /* Lost: the engine's next output for the unknown handle repeats it. */
    (void)!self->ops.send_engine(self->ops.ctx, rank, &msg, NULL);
}

bool engine_client_abort(engine_client_t *self, uint64_t handle)
{
    entry_t *e = find(self, handle);
    if (e == NULL) {
        return false;
    }
    uint32_t rank = e->rank;
    take_out(self, e);
    free(e);
    send_abort(self, rank, handle);
    return true;
}

static void tell_epochs(engine_client_t *self)
{
    msg_t msg = {.type = MSG_HEARTBEAT};
    msg.heartbeat = (msg_heartbeat_t){.role = MSG_ROLE_FRONTEND,
                                      .rank = self->config.client,
                                      .weight_epoch = self->info.weight_epoch,
                                      .group_epoch = self->info.group_epoch};
    (void)!self->ops.send_coordinator(self->ops.ctx, &msg, NULL); /* said again each second */
}

/* The coordinator learns of new weights from whoever was told of them, too: the ranks that hold
 * them may die with their reports. */
static void note_weights(engine_client_t *self, uint64_t epoch)
{
    if (epoch > self->info.weight_epoch) {
        self->info.weight_epoch = epoch;
        tell_epochs(self);
    }
}

static void on_output(engine_client_t *self, uint32_t rank, const msg_output_t *out)
{
    entry_t *e = find(self, out->handle);
    if (e == NULL || e->rank != rank) {
        if (out->finish_reason == FINISH_NONE && e == NULL) {
            send_abort(self, rank, out->handle);
        }
        return;
    }
    note_weights(self, out->epoch);
    engine_output_fn fn = e->fn;
    void *ctx = e->ctx;
    if (out->finish_reason != FINISH_NONE) {
        take_out(self, e);
        free(e);
    }
    fn(ctx, out->handle, out);
}

/* Ends every open request of the rank. */
static void fail_requests(engine_client_t *self, uint32_t rank, const char *why)
{
    entry_t *e;
    while ((e = self->ranks[rank].head) != NULL) {
        msg_output_t out = {
            .handle = e->handle,
            .finish_reason = FINISH_ERROR,
            .stop_token = -1,
            .error = msg_str(why),
            .error_status = LK_ERR_UNAVAILABLE,
        };
        entry_t ended = *e;
        take_out(self, e);
        free(e);
        ended.fn(ended.ctx, ended.handle, &out);
    }
}

/* Messages were lost between the rank and us, whichever way. Commands and their answers are said
 * again; requests and utilities may have lost their beginning or a part of their output. */
static void on_loss(engine_client_t *self, uint32_t rank)
{
    LK_WARN("messages between this front end and engine %u are lost; a connection broke", rank);
    char text[96];
    lk_text(text, sizeof text, "the connection to engine %u broke; try again", rank);
    if (self->ranks[rank].head != NULL) {
        msg_t msg = {.type = MSG_ABORT};
        msg.abort.client = self->config.client;                        /* all of them */
        (void)!self->ops.send_engine(self->ops.ctx, rank, &msg, NULL); /* see send_abort */
    }
    fail_requests(self, rank, text);
    utility_calls_on_dead(self->utilities, rank, text);
    cmd_stream_on_loss(self->stream, rank);
}

/* Before the message itself is looked at. */
static void look_for_gap(engine_client_t *self, const msg_t *msg)
{
    bool from_output = msg->sender_role == MSG_ROLE_ENGINE && msg->type != MSG_ENGINE_HERE &&
                       msg->sender_rank < self->config.n_ranks;
    if (from_output &&
        msg_track_gap(&self->ranks[msg->sender_rank].track, msg->generation, msg->sequence)) {
        on_loss(self, msg->sender_rank);
    }
}

static bool on_missed(engine_client_t *self, const msg_missed_t *missed)
{
    if (missed->rank < self->config.n_ranks && missed->generation == self->config.generation) {
        on_loss(self, (uint32_t)missed->rank);
    }
    return missed->rank < self->config.n_ranks;
}

/* ---- group epochs: F of docs/MEMBERSHIP.md ---- */

/* Until the next epoch serves. What is open and can't end any more is answered with `why`. */
static void close_group(engine_client_t *self, const char *why)
{
    if (self->closed == NULL) {
        self->closed = strdup(why);
        CHECKF(self->closed != NULL, "out of memory");
    }
    self->info.closed = true;
    /* Control calls need every rank; what they wait for won't come. */
    cmd_stream_restart(self->stream, LK_ERR_UNAVAILABLE, self->closed);
    for (uint32_t r = 0; r < self->config.n_ranks && self->info.lockstep; r++) {
        fail_requests(self, r, self->closed);
    }
}

static bool is_whole(const engine_client_t *self)
{
    bool whole = self->info.serving && self->info.group_epoch > 0;
    for (uint32_t r = 0; r < self->config.n_ranks; r++) {
        const rank_t *rank = &self->ranks[r];
        bool here = rank->dead == NULL && rank->here_epoch == self->info.group_epoch;
        whole = whole && (here || rank->removed != NULL);
    }
    return whole;
}

static void open_if_whole(engine_client_t *self)
{
    self->info.whole = is_whole(self);
    if (self->info.whole) {
        free(self->closed);
        self->closed = NULL;
        self->info.closed = false;
    }
}

/* why: what ended the last one, if that is known; else "". */
static void follow_epoch(engine_client_t *self, uint64_t epoch, const char *why)
{
    if (epoch <= self->info.group_epoch) {
        return;
    }
    bool first = self->info.group_epoch == 0;
    self->info.group_epoch = epoch;
    self->info.serving = false;
    tell_epochs(
        self); /* a later life of it may not know, and all who were there may be dead soon */
    if (!first) {
        char text[512];
        lk_text(text, sizeof text, "the group of engines is being formed anew%s%s%s; try again",
                why[0] != '\0' ? " (" : "", why, why[0] != '\0' ? ")" : "");
        close_group(self, text);
    }
    cmd_stream_set_group_epoch(self->stream, epoch);
}

static void set_dead(engine_client_t *self, uint32_t rank, const char *why)
{
    if (self->ranks[rank].dead != NULL || self->ranks[rank].removed != NULL) {
        return;
    }
    char text[512];
    bool named = strncmp(why, "engine ", 7) == 0;
    if (named) {
        lk_text(text, sizeof text, "%s", why);
    } else {
        lk_text(text, sizeof text, "engine %u: %s", rank, why[0] != '\0' ? why : "died");
    }
    self->ranks[rank].dead = strdup(text);
    CHECKF(self->ranks[rank].dead != NULL, "out of memory");
    self->ranks[rank].dead_epoch = self->info.group_epoch;
    self->info.n_dead++;
    router_set_dead(&self->router, rank, true);
    utility_calls_on_dead(self->utilities, rank, text);
    close_group(self, text);
    fail_requests(self, rank, text);
}

static void set_alive(engine_client_t *self, uint32_t rank)
{
    if (self->ranks[rank].dead != NULL) {
        free(self->ranks[rank].dead);
        self->ranks[rank].dead = NULL;
        self->info.n_dead--;
        router_set_dead(&self->router, rank, false);
    }
}

/* The launcher's word: the rank does not come back. What waits for it does not wait any more. */
static void set_removed(engine_client_t *self, uint32_t rank, const char *why)
{
    if (self->ranks[rank].removed != NULL) {
        return;
    }
    char text[512];
    lk_text(text, sizeof text, "engine %u was removed: %s", rank, why);
    LK_WARN("%s", text);
    set_dead(self, rank, text); /* if it was not */
    set_alive(self, rank);      /* among the dead it does not count */
    self->ranks[rank].removed = strdup(text);
    CHECKF(self->ranks[rank].removed != NULL, "out of memory");
    self->ranks[rank].reported = false;
    self->info.n_members--;
    router_set_dead(&self->router, rank, true);
    cmd_stream_remove(self->stream, rank);
    utility_calls_remove(self->utilities, rank, text);
}

/* The rank has entered a group epoch; it may be a new process. */
static void on_here(engine_client_t *self, const msg_engine_here_t *here)
{
    uint32_t r = (uint32_t)here->rank;
    rank_t *rank = &self->ranks[r];
    if (here->generation < rank->here_generation || here->group_epoch < rank->here_epoch ||
        rank->removed != NULL) {
        return; /* an older life's */
    }
    bool news = here->generation > rank->here_generation || here->group_epoch > rank->here_epoch;
    bool replaced = rank->here_generation != 0 && here->generation > rank->here_generation;
    if (here->generation > rank->here_generation) {
        msg_track_begin(&rank->track, here->generation, here->said);
    }
    rank->here_generation = here->generation;
    rank->here_epoch = here->group_epoch;
    follow_epoch(self, here->group_epoch, msg_cstr(here->why));
    if (replaced) {
        char text[64];
        lk_text(text, sizeof text, "engine %u has ended and was started again", r);
        utility_calls_on_dead(self->utilities, r, text);
        fail_requests(self, r, text);
    }
    if (here->group_epoch > rank->dead_epoch) {
        set_alive(self, r);
    }
    open_if_whole(self);
    if (news) {
        cmd_stream_on_here(self->stream, r);
    }
}

/* The rank goes on, but its group epoch is over, usually because another rank is dead. */
static void on_left(engine_client_t *self, const msg_left_t *left)
{
    if (left->group_epoch < self->info.group_epoch) {
        return;
    }
    follow_epoch(self, left->group_epoch, msg_cstr(left->why));
    self->info.lockstep = left->lockstep;
    self->ranks[left->rank].left_epoch = left->group_epoch;
    char text[512];
    bool lost = left->lost >= 0 && left->lost < (int64_t)self->config.n_ranks &&
                self->ranks[left->lost].removed == NULL &&
                self->ranks[left->lost].left_epoch < left->group_epoch;
    if (lost) {
        lk_text(text, sizeof text, "engine %u is lost (%s); the group is formed anew, try again",
                (unsigned)left->lost, msg_cstr(left->why));
        set_dead(self, (uint32_t)left->lost, text);
    } else {
        lk_text(text, sizeof text,
                "engine %llu left the group (%s), which is formed anew; try again",
                (unsigned long long)left->rank, msg_cstr(left->why));
        close_group(self, text);
    }
}

const char *engine_client_closed_reason(const engine_client_t *self)
{
    return self->closed;
}

const char *engine_client_dead_reason(const engine_client_t *self, uint32_t rank)
{
    return rank < self->config.n_ranks ? self->ranks[rank].dead : NULL;
}

const char *engine_client_removed_reason(const engine_client_t *self, uint32_t rank)
{
    return rank < self->config.n_ranks ? self->ranks[rank].removed : NULL;
}

static void keep_load(engine_client_t *self, const msg_load_t *load)
{
    if (load->rank >= self->config.n_ranks || self->ranks[load->rank].removed != NULL) {
        return;
    }
    rank_t *r = &self->ranks[load->rank];
    r->reported = true;
    r->load = *load;
    snprintf(r->version, sizeof r->version, "%s", msg_cstr(load->weight_version));
    r->load.weight_version = msg_str(r->version);
}

const msg_load_t *engine_client_load(const engine_client_t *self, uint32_t rank)
{
    bool known = rank < self->config.n_ranks && self->ranks[rank].reported;
    return known ? &self->ranks[rank].load : NULL;
}

/* Ranks that wait for an update refuse requests: the others get them. */
static void avoid_closed_ranks(engine_client_t *self, const msg_stats_t *stats)
{
    for (size_t i = 0; i < stats->loads.count; i++) {
        const msg_load_t *load = &stats->loads.items[i];
        if (load->rank < self->config.n_ranks) {
            router_set_avoided(&self->router, (uint32_t)load->rank,
                               !self->info.lockstep && (load->gates & GATE_DIRTY));
        }
    }
}

static void on_stats(engine_client_t *self, const msg_stats_t *stats)
{
    engine_client_info_t *info = &self->info;
    if (stats->group_epoch < info->group_epoch) {
        return;
    }
    for (size_t i = 0; i < stats->removed.count; i++) {
        const msg_removal_t *removal = &stats->removed.items[i];
        if (removal->rank < self->config.n_ranks && info->n_members > 1) {
            set_removed(self, (uint32_t)removal->rank, msg_cstr(removal->why));
        }
    }
    follow_epoch(self, stats->group_epoch, msg_cstr(stats->why));
    bool served = info->serving;
    /* a coordinator that was started again has not heard of everybody yet: no word of a break */
    bool unsure = served && !stats->serving && stats->why.len == 0 && stats->dead.count == 0;
    info->serving = stats->serving || unsure;
    info->lockstep = stats->serving ? stats->lockstep : info->lockstep;
    info->run = stats->run;
    info->paused = stats->paused;
    info->wave = stats->wave;
    info->round = stats->round;
    if (stats->max_model_len != 0) { /* else it has not heard of any engine yet */
        info->max_model_len = stats->max_model_len;
        info->num_blocks = stats->num_blocks;
        info->vocab_size = stats->vocab_size;
    }
    info->weight_epoch = LK_MAX(info->weight_epoch, stats->weight_epoch);
    info->gates = 0;
    for (size_t i = 0; i < stats->loads.count; i++) {
        const msg_load_t *l = &stats->loads.items[i];
        info->gates |= l->gates;
        info->weight_epoch = LK_MAX(info->weight_epoch, l->weight_epoch);
        keep_load(self, l);
        router_report(&self->router, l->rank, l->waiting, l->running, l->kv_usage);
    }
    for (size_t i = 0; i < stats->dead.count; i++) {
        const char *text = msg_cstr(stats->dead.items[i].text);
        unsigned rank;
        if (sscanf(text, "engine %u", &rank) == 1 && rank < self->config.n_ranks) {
            set_dead(self, rank, text);
        }
    }
    if (served && !info->serving) {
        char text[512];
        lk_text(text, sizeof text, "%s; the group is formed anew, try again",
                stats->why.len > 0 ? msg_cstr(stats->why) : "an engine is lost");
        close_group(self, text);
    }
    avoid_closed_ranks(self, stats);
    open_if_whole(self);
}

void engine_client_info(const engine_client_t *self, engine_client_info_t *out)
{
    *out = self->info;
}

static bool dispatch(engine_client_t *self, const msg_t *msg)
{
    uint32_t n = self->config.n_ranks;
    switch (msg->type) {
    case MSG_OUTPUTS:
        for (size_t i = 0; i < msg->outputs.outputs.count && msg->outputs.rank < n; i++) {
            on_output(self, (uint32_t)msg->outputs.rank, &msg->outputs.outputs.items[i]);
        }
        return msg->outputs.rank < n;
    case MSG_SEEN:
        return msg->seen.rank < n && cmd_stream_on_seen(self->stream, &msg->seen);
    case MSG_DONE:
        note_weights(self, msg->done.rank < n ? msg->done.weight_epoch : 0);
        return msg->done.rank < n && cmd_stream_on_done(self->stream, &msg->done);
    case MSG_UTILITY_REPLY:
        return msg->utility_reply.rank < n &&
               utility_calls_on_reply(self->utilities, &msg->utility_reply);
    case MSG_ENGINE_HERE:
        if (msg->engine_here.rank < n) {
            on_here(self, &msg->engine_here);
        }
        return msg->engine_here.rank < n;
    case MSG_LEFT:
        if (msg->left.rank < n) {
            on_left(self, &msg->left);
        }
        return msg->left.rank < n;
    case MSG_ENGINE_DEAD:
        if (msg->engine_dead.rank < n) {
            set_dead(self, (uint32_t)msg->engine_dead.rank, msg_cstr(msg->engine_dead.why));
        }
        return msg->engine_dead.rank < n;
    case MSG_MISSED:
        return on_missed(self, &msg->missed);
    case MSG_HEARTBEAT: /* an engine's: its number has said all */
        return msg->heartbeat.rank < n;
    case MSG_STATS:
        on_stats(self, &msg->stats);
        return true;
    default:
        return false;
    }
}

void engine_client_on_msg(engine_client_t *self, const msg_t *msg)
{
    look_for_gap(self, msg);
    if (!dispatch(self, msg)) {
        self->info.dropped++;
    }
}

/* So that an engine notices that it has missed something. */
static void beat(engine_client_t *self)
{
    uint64_t now = lk_env_now_ns(self->ops.env);
    if (now - self->beat_ns < ENGINE_CLIENT_RESEND_NS) {
        return;
    }
    self->beat_ns = now;
    tell_epochs(self);
    for (uint32_t r = 0; r < self->config.n_ranks; r++) {
        if (self->ranks[r].removed != NULL) {
            continue;
        }
        msg_t msg = {.type = MSG_HEARTBEAT};
        msg.heartbeat = (msg_heartbeat_t){.role = MSG_ROLE_FRONTEND, .rank = self->config.client};
        (void)!self->ops.send_engine(self->ops.ctx, r, &msg, NULL); /* the next one is as good */
    }
}

void engine_client_poll(engine_client_t *self)
{
    beat(self);
    cmd_stream_poll(self->stream);
    utility_calls_poll(self->utilities);
}

void engine_client_end_calls(engine_client_t *self, const char *why)
{
    cmd_stream_restart(self->stream, LK_ERR_UNAVAILABLE, why);
    for (uint32_t r = 0; r < self->config.n_ranks; r++) {
        utility_calls_on_dead(self->utilities, r, why);
    }
}

/* ---- control calls ---- */

/* Refuses a call at once when it can't be carried out. */
static bool refuse(engine_client_t *self, engine_result_fn fn, void *ctx)
{
    engine_result_t result = {LK_OK, NULL, 0, NULL};
    result.text = self->closed;
    if (result.text == NULL && cmd_stream_num_open(self->stream) >= ENGINE_CLIENT_MAX_CALLS) {
        result.text = "too many control calls are open";
    }
    if (result.text == NULL) {
        return false;
    }
    result.status = LK_ERR_UNAVAILABLE;
    fn(ctx, &result);
    return true;
}

static uint64_t or_default(uint64_t timeout_ns, uint64_t otherwise)
{
    return timeout_ns != 0 ? timeout_ns : otherwise;
}

void engine_client_pause(engine_client_t *self, pause_mode_t mode, bool clear_cache,
                         uint64_t timeout_ns, engine_result_fn fn, void *ctx)
{
    if (refuse(self, fn, ctx)) {
        return;
    }
    cmd_desc_t desc = {.kind = CMD_PAUSE, .mode = mode, .clear_cache = clear_cache};
    uint64_t standard =
        mode == PAUSE_WAIT ? ENGINE_CLIENT_NO_DEADLINE : self->config.control_timeout_ns;
    cmd_stream_call(self->stream, &desc, or_default(timeout_ns, standard), fn, ctx);
}

void engine_client_resume(engine_client_t *self, uint64_t timeout_ns, engine_result_fn fn,
                          void *ctx)
{
    if (!refuse(self, fn, ctx)) {
        cmd_desc_t desc = {.kind = CMD_RESUME};
        cmd_stream_call(self->stream, &desc,
                        or_default(timeout_ns, self->config.control_timeout_ns), fn, ctx);
    }
}

void engine_client_update(engine_client_t *self, update_verb_t verb, const char *spec,
                          size_t spec_len, uint64_t timeout_ns, engine_result_fn fn, void *ctx)
{
    if (refuse(self, fn, ctx)) {
        return;
    }
    bool lengthy =
        verb == UPDATE_VERB_INIT || verb == UPDATE_VERB_UPDATE || verb == UPDATE_VERB_FINISH;
    uint64_t standard =
        lengthy ? self->config.transfer_timeout_ns : self->config.control_timeout_ns;
    if (verb == UPDATE_VERB_ABORT) {
        cmd_stream_cancel_update(self->stream, 0, "a caller aborted the weight update");
    }
    cmd_desc_t desc = {.kind = CMD_UPDATE, .verb = verb, .spec = {spec, spec_len}};
    cmd_stream_call(self->stream, &desc, or_default(timeout_ns, standard), fn, ctx);
}

void engine_client_utility(engine_client_t *self, const char *method, const char *args,
                           uint64_t timeout_ns, engine_result_fn fn, void *ctx)
{
    if (utility_calls_num_open(self->utilities) >= ENGINE_CLIENT_MAX_CALLS) {
        engine_result_t result = {LK_ERR_UNAVAILABLE, "too many calls are open", 0, NULL};
        fn(ctx, &result);
        return;
    }
    const char *dead[ROUTER_MAX_RANKS];
    for (uint32_t r = 0; r < self->config.n_ranks; r++) {
        dead[r] = self->ranks[r].dead;
    }
    utility_calls_call(self->utilities, dead, method, args,
                       or_default(timeout_ns, self->config.control_timeout_ns), fn, ctx);
}
