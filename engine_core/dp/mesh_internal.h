/*
 * mesh_internal.h: what the mesh's own files share. mesh.c connects, mesh_conn.c moves frames,
 * mesh_vote.c and mesh_ep.c are the two users of the frames.
 *
 * A frame is a header in this host's byte order (AF_UNIX: there is no other host) and `length`
 * bytes. Votes and exchanges share a connection and do not order each other.
 */
#ifndef LK_ENGINE_CORE_DP_MESH_INTERNAL_H
#define LK_ENGINE_CORE_DP_MESH_INTERNAL_H

#include "base/buf.h"
#include "engine_core/dp/mesh.h"

#define MESH_MAGIC        0x4d534b4cu /* "LKSM" */
#define MESH_VERSION      1
#define MESH_MAX_EXCHANGE (1ull << 30) /* bytes from one rank to another in one exchange */
#define MESH_STAGE        (16u << 10)  /* small frames are read through a buffer of this size */
#define MESH_MAX_PENDING  1024         /* accepted connections that have not said who they are */

typedef enum { FRAME_HELLO = 1, FRAME_VOTE, FRAME_EXCHANGE, FRAME_BYE } mesh_frame_t;

typedef struct {
    uint32_t magic;
    uint16_t version, kind;
    uint64_t epoch;  /* of the group */
    uint64_t seq;    /* VOTE: round; EXCHANGE: number of the exchange in this group, from 0 */
    uint64_t tag;    /* EXCHANGE: the caller's */
    uint64_t length; /* bytes that follow */
} mesh_header_t;

/* The sender's rank, and how many members it knows. */
typedef struct {
    uint32_t rank, size;
} mesh_hello_t;

/* The sender leaves its group epoch. */
typedef struct {
    int64_t lost;  /* the rank to blame; -1: unknown */
    char why[184]; /* NUL-terminated */
} mesh_bye_t;

/* Where the bytes of a frame go; filled by mesh_on_header. */
typedef struct mesh_conn {
    int fd;
    int rank; /* -1: not known yet */
    bool got_hello;
    uint64_t epoch; /* of its hello */
    mesh_hello_t hello;
    /* reading */
    mesh_header_t head;
    size_t head_got;
    bool in_body;
    uint8_t *body; /* NULL: the frame is dropped */
    size_t body_got;
    uint64_t vote[ALLREDUCE_MAX_LEN];
    mesh_bye_t bye;
    bool got_bye;
    /* writing: an exchange that has begun, then control, then an exchange that has not */
    lk_buf_t control;
    size_t control_sent;
    mesh_header_t ex_head;
    const uint8_t *ex_data; /* the caller's */
    size_t ex_sent;         /* of header and data together */
    bool ex_active;
    /* small reads */
    size_t stage_at, stage_len;
    uint8_t stage[MESH_STAGE];
} mesh_conn_t;

typedef struct {
    bool used;
    uint64_t round;
    size_t n;
    uint64_t vec[ALLREDUCE_MAX_LEN];
} mesh_vote_slot_t;

typedef struct {
    bool used;     /* its header was read */
    bool complete; /* and all its bytes */
    uint64_t seq, tag;
    uint8_t *data;
    size_t len, cap;
} mesh_ex_slot_t;

/* Two slots each, by the parity of round or exchange number: a peer may be one ahead. */
typedef struct {
    bool member;
    mesh_conn_t *conn;
    char address[112]; /* for another try to connect */
    bool dead;
    char why[256]; /* names the rank */
    int64_t lost;  /* the rank to blame for it */
    mesh_vote_slot_t votes[2];
    mesh_ex_slot_t exchanges[2];
} mesh_peer_t;

struct mesh {
    uint32_t rank;
    uint32_t size;     /* 1 + the highest rank of a member */
    uint32_t n, place; /* members, and this rank's index among them */
    uint32_t *members; /* [n] ranks, ascending */
    uint64_t epoch;
    bool joined; /* mesh_connect_post was called */
    bool whole;      /* mesh_connect_test has said so */
    unsigned passed; /* polls since the last look at the listener */
    int listen_fd;
    char address[112];
    mesh_peer_t *peers; /* [size] by rank; own entry and those of no member unused */
    mesh_conn_t *pending[MESH_MAX_PENDING];
    size_t n_pending;
    struct {
        bool posted, any_done;
        uint64_t round, done; /* done: the last round that was decided here */
        size_t n;
        uint64_t vec[ALLREDUCE_MAX_LEN];
    } vote;
    struct {
        bool posted;
        uint64_t seq; /* of the posted one, or of the next */
        uint64_t tag;
    } ex;
    mesh_stats_t stats;
};

/* ---- mesh_conn.c ---- */

mesh_conn_t *mesh_conn_new(int fd); /* owns fd */
void mesh_conn_destroy(mesh_conn_t **self_p);
/* Copies a frame behind the control frames. */
void mesh_conn_queue(mesh_conn_t *self, const mesh_header_t *head, const void *body);
/* Forgets an exchange whose data the caller takes back; finishes a frame that has begun. */
void mesh_conn_cancel_exchange(mesh_conn_t *self);
bool mesh_conn_has_output(const mesh_conn_t *self);
/* OK: all written. INPROGRESS: the socket is full. LK_ERR_PEER: the other end is gone. */
lk_status_t mesh_conn_flush(mesh_conn_t *self, lk_error_t *err);
/* Reads what there is. INPROGRESS: nothing more now. OK: a hello was read, reading stopped behind
 * it. LK_ERR_PEER: end of file ("closed its mesh connection") or a broken frame; texts lack the
 * rank. */
lk_status_t mesh_conn_read(mesh_t *mesh, mesh_conn_t *self, lk_error_t *err);

/* ---- mesh.c ---- */

/* Reads and writes one peer; a failure marks it dead. */
void mesh_pump(mesh_t *self, uint32_t rank);
/* LK_ERR_PEER with why, if rank is dead. */
lk_status_t mesh_peer_status(const mesh_t *self, uint32_t rank, lk_error_t *err);
/* The same for the first dead rank of all. */
lk_status_t mesh_any_dead(const mesh_t *self, lk_error_t *err);
/* "1, 3": ranks for which missing() says so. */
void mesh_list(const mesh_t *self, bool (*missing)(const mesh_t *self, uint32_t rank), char *out,
               size_t room);
static inline bool mesh_is_peer(const mesh_t *self, uint32_t rank)
{
    return rank != self->rank && self->peers[rank].member;
}
static inline mesh_header_t mesh_header(const mesh_t *self, mesh_frame_t kind, uint64_t seq,
                                        uint64_t tag, uint64_t length)
{
    return (mesh_header_t){MESH_MAGIC, MESH_VERSION, (uint16_t)kind, self->epoch, seq, tag, length};
}

/* ---- mesh_vote.c, mesh_ep.c: a frame's header was read, then its body ---- */

/* Checks the header and says where the body goes (*body NULL: drop it). */
lk_status_t mesh_vote_header(mesh_t *self, mesh_conn_t *conn, uint8_t **body, lk_error_t *err);
lk_status_t mesh_vote_frame(mesh_t *self, mesh_conn_t *conn, lk_error_t *err);
lk_status_t mesh_ep_header(mesh_t *self, mesh_conn_t *conn, uint8_t **body, lk_error_t *err);
lk_status_t mesh_ep_frame(mesh_t *self, mesh_conn_t *conn, lk_error_t *err);

#endif
