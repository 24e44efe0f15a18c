/*
 * cmd_stream.h: the numbered commands of this front end to every rank (protocol.md sections 3 and
 * 10): numbering within a generation, SEEN and resending, DONE from all ranks, deadlines that name
 * ranks, CANCEL as the rollback of a PAUSE, exclusive UPDATEs. Part of engine_client; pure.
 */
#ifndef LK_API_FRONTEND_CMD_STREAM_H
#define LK_API_FRONTEND_CMD_STREAM_H

#include "api_frontend/engine_client.h"
#include "base/buf.h"

typedef struct cmd_stream cmd_stream_t;

typedef struct {
    cmd_kind_t kind;
    pause_mode_t mode;  /* PAUSE */
    bool clear_cache;   /* PAUSE */
    uint64_t target;    /* CANCEL */
    update_verb_t verb; /* UPDATE */
    msg_str_t spec;     /* UPDATE; copied */
} cmd_desc_t;

/* Both are borrowed and outlive the stream. */
cmd_stream_t *cmd_stream_new(const engine_client_config_t *config, const engine_client_ops_t *ops);
void cmd_stream_destroy(cmd_stream_t **self_p);

/* Numbers and sends the command, or queues it behind an UPDATE. */
void cmd_stream_call(cmd_stream_t *self, const cmd_desc_t *desc, uint64_t timeout_ns,
                     engine_result_fn fn, void *ctx);
/* CANCEL_UPDATE (number 0: whichever is in flight) to every rank; outside the stream. */
void cmd_stream_cancel_update(cmd_stream_t *self, uint64_t number, const char *why);

/* From rank (checked by the caller). False when it makes no sense here: another generation, or a
 * number that was never sent. */
bool cmd_stream_on_seen(cmd_stream_t *self, const msg_seen_t *seen);
bool cmd_stream_on_done(cmd_stream_t *self, const msg_done_t *done);
/* The rank has (re)connected: what it has not SEEN is sent again. */
void cmd_stream_on_here(cmd_stream_t *self, uint32_t rank);
/* Messages to or from the rank were lost: what it has not answered is said again. */
void cmd_stream_on_loss(cmd_stream_t *self, uint32_t rank);

void cmd_stream_poll(cmd_stream_t *self);
/* Answers every open call and starts a new generation: the ranks forget the old one's commands, or
 * all apply them. */
void cmd_stream_restart(cmd_stream_t *self, lk_status_t status, const char *text);
/* The rank does not come back: nothing is sent to it, and nothing waits for it. Nothing may be
 * open. */
void cmd_stream_remove(cmd_stream_t *self, uint32_t rank);
void cmd_stream_set_group_epoch(cmd_stream_t *self, uint64_t group_epoch);
size_t cmd_stream_num_open(const cmd_stream_t *self);

/* Fills a result from the ranks' answers: statuses must be equal, texts are joined ("rank 1: ..."
 * unless all ranks say the same). */
void engine_result_merge(engine_result_t *result, lk_buf_t *text);

#endif
