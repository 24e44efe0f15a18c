/*
 * command_stream.h: one front end's numbered commands as one rank has received them: a generation,
 * the gap-free prefix seen, and the local verdict on the outstanding UPDATE. Local state of
 * protocol.md section 2 (cmd, seen, voted, ok); what is applied is the group's business.
 *
 * Generations (R21): once a newer life of the front end is heard of, nothing of the old one is
 * accepted, and the next vote is for the new one. Commands that a vote which is still out covers
 * are kept until it is decided.
 */
#ifndef LK_ENGINE_CORE_DP_COMMAND_STREAM_H
#define LK_ENGINE_CORE_DP_COMMAND_STREAM_H

#include "proto/messages.h"
#include "transfer/update_session.h"

/* Commands of one front end that are seen and not applied yet; more are not taken. */
#define STREAM_MAX_PENDING 1024

typedef struct {
    uint64_t number, kind, mode, target, verb;
    uint64_t deadline_ns; /* PAUSE; UINT64_MAX: none */
    bool clear_cache;
    char *spec; /* owned, NUL-terminated */
    size_t spec_len;
} command_t;

typedef struct {
    command_t *items; /* numbers first .. first + n - 1; a ring of cap entries */
    size_t head, n, cap;
    uint64_t first;
} command_list_t;

typedef enum {
    STREAM_NEW,
    STREAM_REPEATED,
    STREAM_GAP,
    STREAM_OLD_LIFE,
    STREAM_BUSY
} stream_receipt_t;

typedef struct {
    bool shadow;         /* for life */
    uint64_t generation; /* the life I follow; 0: none heard of */
    uint64_t seen;       /* number of the last command received */
    command_list_t pending;
    bool update_outstanding; /* an UPDATE of this life is not answered yet: nothing may follow it
                                (R20), or no other UPDATE if it is carried out beside the steps */
    uint64_t update_number, update_verb;
    lk_error_t verdict; /* on it; LK_OK when there is none */

    bool frozen; /* a vote is out: */
    uint64_t voted_generation, voted_seen;
    command_list_t old; /* of the voted life, when a newer one was heard of since */
} command_stream_t;

void stream_init(command_stream_t *self, bool shadow);
void stream_fini(command_stream_t *self);
/* As new, but what is older than the life that is followed stays so. */
void stream_reset(command_stream_t *self);

/* Takes a command. NEW: stored (for an UPDATE the caller then sets `verdict`). REPEATED: was seen.
 * GAP: commands before it are missing; OLD_LIFE: of a generation that is over; BUSY: may not
 * follow an unanswered UPDATE, or too many are pending. In the last three cases nothing changed. */
stream_receipt_t stream_receive(command_stream_t *self, const msg_cmd_t *cmd);
/* Something my last vote did not say. */
bool stream_has_news(const command_stream_t *self);
/* My vote goes out: generation and seen as they stand are what it says. */
void stream_freeze(command_stream_t *self);
/* The command `number` of the voted life; it must have been seen by the vote. Its spec may be taken
 * out (set to NULL). */
command_t *stream_voted_command(const command_stream_t *self, uint64_t number);
/* A CANCEL of the voted life's command `number` is here, whether the vote covers it or not. */
bool stream_has_cancel(const command_stream_t *self, uint64_t number);
/* Lowest number of a PAUSE that waits together with its CANCEL, or whose deadline is over (its
 * CANCEL is under way); UINT64_MAX if there is none. */
uint64_t stream_cancelled_pause(const command_stream_t *self, uint64_t now_ns);
/* Forgets commands of the voted life up to `number`, which are applied. */
void stream_applied(command_stream_t *self, uint64_t number);
/* The vote is decided: commands of an older life are forgotten. */
void stream_settle(command_stream_t *self);
/* A PAUSE is seen and not applied yet. */
bool stream_has_pause(const command_stream_t *self);
/* Follows a newer life; false if `generation` is not newer. */
bool stream_follow(command_stream_t *self, uint64_t generation);
/* An UPDATE is answered; the stream may go on. */
void stream_update_answered(command_stream_t *self, uint64_t generation, uint64_t number);

#endif
