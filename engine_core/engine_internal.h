/*
 * engine_internal.h: the inside of engine_core.h, for its four files: engine_core.c (the loop
 * body), engine_actions.c (what the group asks for), engine_requests.c (messages about requests and
 * utilities), engine_reports.c (load reports and JSON bodies).
 */
#ifndef LK_ENGINE_CORE_ENGINE_INTERNAL_H
#define LK_ENGINE_CORE_ENGINE_INTERNAL_H

#include "base/buf.h"
#include "engine_core/engine_core.h"
#include "engine_core/outbox.h"
#include "engine_core/reply_log.h"
#include "engine_core/version_labels.h"
#include "proto/msg_track.h"

#define RECEIPT_NS         LK_MS_NS         /* how long a SEEN may wait for its DONE */
#define REPORT_INTERVAL_NS (100 * LK_MS_NS) /* least time between two load reports */

/* A wait for peers: a vote or a step that is out. */
typedef struct {
    uint64_t since_ns;
    bool warned;
} watch_t;

/* A SEEN that is put off: the DONE that usually follows soon makes it superfluous. */
typedef struct {
    bool due;
    uint64_t generation, number;
    uint64_t since_ns;
} receipt_t;

struct engine_core {
    engine_core_config_t config;
    group_t *group;
    kv_cache_t *kv;
    scheduler_t *scheduler;
    update_session_t *session;
    weight_sink_t sink;
    version_labels_t labels;
    outbox_t *outbox;
    uint64_t *lives; /* [n_frontends]: of each front end's process, the newest that was heard of */
    msg_track_t *tracks; /* [n_frontends] */
    reply_log_t *replies;
    receipt_t receipts[GROUP_MAX_FRONTENDS];
    uint32_t receipts_due;

    /* the step under way */
    bool step_posted, step_is_dummy;
    bool renewed;       /* other weights are in force than in the last step */
    bool recompute_due; /* running requests recompute their KV when it ends */
    exec_batch_t dummy;
    uint64_t steps, dummy_steps;
    uint64_t stepped_ns;   /* when the newest one ended */
    uint64_t steps_before; /* this group epoch */
    watch_t step_watch;

    /* the vote under way */
    uint64_t vec[ALLREDUCE_MAX_LEN];
    watch_t vote_watch;

    /* the weight call under way */
    bool updating;
    update_verb_t update_verb;
    uint64_t update_since_ns;
    uint64_t update_moves;      /* what its progress said last */
    bool update_soon;           /* likewise */
    uint64_t update_resume_ns;  /* before that, steps go first */
    wte_progress_t update_last; /* of the last UPDATE, with its time: */
    double update_seconds;
    uint64_t session_active_ns; /* when the open session last saw a call */
    uint64_t held_content;      /* hash of the weights in force, when the last group was formed */
    uint64_t content;           /* hash of the weights that were committed last */

    lk_status_t finish_status; /* what FINISH_ERROR outputs of the scheduler mean right now */
    bool draining;             /* shutting down */
    bool left;                 /* its group epoch is over */
    bool failed;
    lk_error_t failure;

    /* reports */
    uint64_t reported_ns;    /* when LOAD went out last */
    uint64_t reported_hash;  /* what it said */
    uint64_t reported_epoch; /* the weights' */
    uint64_t heartbeat_ns;   /* when HEARTBEAT went out last */
    bool report_pending;     /* something else is true by now */
    bool group_report_due;   /* GROUP, after the answers that callers wait for */
    uint64_t prompt_tokens, generation_tokens;
    uint64_t votes;
    uint64_t pauses, paused_since_ns, paused_ns, last_pause_ns; /* of closed windows */
    bool was_paused;
    uint64_t updates, updates_failed, update_tensors, update_bytes, update_ns;
    lk_buf_t text; /* scratch for JSON */
};

/* engine_core.c */
void engine_fail(engine_core_t *self, const lk_error_t *why);
void engine_flush(engine_core_t *self);
/* A collective failed because of a peer: the group epoch is over. */
void engine_peer_error(engine_core_t *self, const lk_error_t *err);
/* Why it takes no work right now, for whoever asked. */
void engine_left_text(const engine_core_t *self, char *out, size_t room);
static inline bool engine_lockstep(const engine_core_t *self)
{
    return self->config.lockstep && self->config.dp_size > 1;
}
static inline uint64_t engine_now(const engine_core_t *self)
{
    return lk_env_now_ns(self->config.env);
}

/* engine_watch.c */
void engine_start_watch(engine_core_t *self, watch_t *watch);
/* Names the ranks that a vote or a step waits for; after twice the control timeout they count as
 * lost. */
void engine_check_watches(engine_core_t *self);

/* engine_actions.c */
void engine_take_actions(engine_core_t *self);
/* A slice of the weight call under way, if it is its turn. True if that moved something. */
bool engine_advance_update(engine_core_t *self);
/* GROUP, with what holds now: it is the newest that counts. */
void engine_report_group_if_due(engine_core_t *self);
/* Sends the SEENs that were put off, once they are old or nothing else is to be done. */
void engine_send_receipts(engine_core_t *self, bool busy);
/* No round will decide on the weight call under way any more: it ends, and its session with it. */
void engine_abandon_update(engine_core_t *self, const char *why);
lk_status_t engine_check_update(void *ctx, update_verb_t verb, const char *spec, size_t spec_len,
                                lk_error_t *err);

/* engine_requests.c */
void engine_on_add(engine_core_t *self, uint32_t frontend, const msg_add_t *add);
void engine_on_abort(engine_core_t *self, uint32_t frontend, const msg_abort_t *abort);
void engine_on_utility(engine_core_t *self, uint32_t frontend, const msg_utility_t *utility);

/* engine_reports.c */
/* Notes when a pause takes force or ends; after whatever may change that. */
void engine_note_pause(engine_core_t *self);
bool engine_report_if_due(engine_core_t *self);
/* What begins may take as long as a transfer may (true), or is over: nobody is to take this process
 * for dead meanwhile. */
void engine_announce_silence(engine_core_t *self, bool begins);
/* Bodies of DONE and UTILITY_REPLY; valid until the next one. */
msg_str_t engine_done_body(engine_core_t *self, const group_action_t *done);
msg_str_t engine_weight_info(engine_core_t *self);
msg_str_t engine_status_body(engine_core_t *self);

#endif
