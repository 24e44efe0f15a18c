/*
 * lockstep_trainer.h: drives a Lockstep cluster from a trainer written in C (or anything that can
 * call C): pause, send weights, resume. One lst_t is one connection to the cluster's trainer socket
 * and, after lst_init_tcp, lst_init_shm or lst_init_nccl, one to each rank; it is used by one
 * thread at a time. Every call blocks until it is answered or its deadline passes.
 *
 *     lst_t *lst;
 *     lst_open(&(lst_options_t){.endpoint = "tcp://engine:7100"}, &lst, err, sizeof err);
 *     lst_init_tcp(lst, NULL);
 *     lst_pause(lst, "keep", true);
 *     lst_start(lst);
 *     lst_update(lst, tensors, n, NULL);
 *     lst_finish(lst, "step-7");
 *     lst_resume(lst);
 *     lst_close(&lst);
 *
 * Calls return LST_OK or a negative lst_status_t; lst_last_error has the text. A call is sent with
 * an idempotency key, and again with the same key when its answer does not come, so a repetition is
 * never carried out twice. A call whose connection is lost (the front end ended) fails at once with
 * LST_ERR_PEER: whether it was carried out is for lst_weight_info or lst_is_paused to say; the next
 * call connects again.
 */
#ifndef LOCKSTEP_TRAINER_H
#define LOCKSTEP_TRAINER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define LST_API      __attribute__((visibility("default")))
#define LST_MAX_DIMS 8

typedef enum {
    LST_OK = 0,
    LST_ERR_INVALID = -1,      /* an argument, or what the cluster calls a bad request */
    LST_ERR_UNSUPPORTED = -2,  /* valid, but not supported */
    LST_ERR_UNAUTHORIZED = -3, /* missing or wrong admin key */
    LST_ERR_NOT_FOUND = -4,    /* no such call, no such file */
    LST_ERR_STATE = -5,        /* not in this state; nothing was changed */
    LST_ERR_TOO_LARGE = -6,
    LST_ERR_UNAVAILABLE = -7, /* not now, try again */
    LST_ERR_TIMEOUT = -8,
    LST_ERR_PEER = -9, /* the cluster or a rank went away in the middle */
    LST_ERR_IO = -10,
    LST_ERR_NO_MEMORY = -11,
    LST_ERR_CANCELED = -12, /* aborted by another caller */
    LST_ERR_INTERNAL = -13
} lst_status_t;

typedef struct lst lst_t;

typedef struct {
    const char *endpoint;  /* the cluster's trainer socket: "tcp://host:port", "ipc://..." */
    const char *admin_key; /* NULL: none */
    double timeout_s;      /* of a call without a transfer; 0: 60 */
    double no_progress_s;  /* of a transfer that moves nothing; 0: 30 */
} lst_options_t;

/* Does not wait for the cluster. On failure *out is untouched and err (which may be NULL) has the
 * text. The caller ends *out with lst_close. */
LST_API lst_status_t lst_open(const lst_options_t *options, lst_t **out, char *err,
                              size_t err_size);
/* Accepts NULL and a pointer to NULL. Does not resume a paused cluster. */
LST_API void lst_close(lst_t **lst_p);
/* Text of the last call that failed; valid until the next call. Never NULL. */
LST_API const char *lst_last_error(const lst_t *lst);

/* ---- generation ---- */

/* mode: "abort", "wait" or "keep"; NULL is "abort". Returns when every rank has stopped. */
LST_API lst_status_t lst_pause(lst_t *lst, const char *mode, bool clear_cache);
LST_API lst_status_t lst_resume(lst_t *lst);
LST_API lst_status_t lst_is_paused(lst_t *lst, bool *paused);
LST_API lst_status_t lst_reset_prefix_cache(lst_t *lst, bool reset_running_requests, bool *success);

/* ---- weights ---- */

typedef struct {
    const char *name;  /* any spelling that the cluster accepts */
    const char *dtype; /* "float32" or "F32", "bfloat16" or "BF16", ... */
    unsigned ndim;
    uint64_t shape[LST_MAX_DIMS];
    const void *data; /* row-major, contiguous; borrowed for the call, not copied. After
                         lst_init_nccl: in the GPU's memory, and complete (what wrote it has run) */
} lst_tensor_t;

typedef struct {
    const char *bind_host;      /* address to listen on; NULL: 127.0.0.1 */
    uint16_t port;              /* 0: any */
    const char *advertise_host; /* what ranks connect to; NULL: bind_host */
    unsigned connections;       /* per rank, 1 to 8; 0: 1 */
} lst_tcp_options_t;

typedef struct {
    uint64_t ring_bytes; /* shared by all ranks, in whole MiB, at least 2; 0: 8 MiB */
    bool unchecked;      /* leave out the digest of each bucket on its way */
} lst_shm_options_t;

typedef struct {
    int device;          /* GPU that holds the tensors: its CUDA ordinal in this process */
    const char *library; /* libnccl; NULL: the one this process has loaded, else libnccl.so.2. Ranks
                            and trainer need the same version */
    bool
        store; /* meet at a TCPStore that this call serves, instead of sending the id in the call */
    const char *bind_host;      /* of the store; NULL: 127.0.0.1 */
    uint16_t port;              /* 0: any */
    const char *advertise_host; /* what ranks connect to; NULL: bind_host */
    bool packed; /* updates will be packed, with the next two: ranks allocate their buffers now */
    uint64_t packed_buffer_size_bytes; /* 0: 1 GiB */
    unsigned packed_num_buffers;       /* of each side, at most 8 are used; 0: 2 */
} lst_nccl_options_t;

typedef struct {
    int device;  /* GPU that holds the tensors: its CUDA ordinal in this process */
    bool packed; /* updates will be packed, unless they say otherwise */
} lst_ipc_options_t;

typedef struct {
    bool packed; /* send tensors together in buckets; small tensors go faster */
    /* 0: 1 GiB; over NCCL what suits the tensors, at most an eighth of them or 1 GiB; tensors that
     * are larger are then sent first */
    uint64_t packed_buffer_size_bytes;
} lst_update_options_t;

/* Number of ranks that receive weights. */
LST_API lst_status_t lst_world_size(lst_t *lst, unsigned *ranks);
/* Listens, tells the cluster where, and waits until every rank is connected; names those that are
 * missing. Again after a failed transfer. options NULL: all defaults. Each lst_init_* asks how many
 * ranks there are: after one was lost for good the next init is all that a trainer has to do. While
 * the cluster forms its group anew it waits for that, no_progress_s at most. */
LST_API lst_status_t lst_init_tcp(lst_t *lst, const lst_tcp_options_t *options);
/* The same through shared memory, for ranks on this host that run as the same user. The memory has
 * no name and goes with the last process that uses it. */
LST_API lst_status_t lst_init_shm(lst_t *lst, const lst_shm_options_t *options);
/* Forms an NCCL communicator with every rank; this trainer is rank 0. Again after a failed
 * transfer, and after an update that the cluster refused while it was being sent. */
LST_API lst_status_t lst_init_nccl(lst_t *lst, const lst_nccl_options_t *options);
/* For ranks whose weights lie on this trainer's GPU, with --weight-transfer-config "ipc". An update
 * is then lst_call("update_weights") with the handles of the tensors as whoever allocated them
 * makes them (torch; examples/python/lockstep_trainer.py shows it), instead of lst_update. */
LST_API lst_status_t lst_init_ipc(lst_t *lst, const lst_ipc_options_t *options);
LST_API lst_status_t lst_start(lst_t *lst);
/* Sends tensors to every rank; any number of times between lst_start and lst_finish. A refusal
 * (LST_ERR_INVALID, LST_ERR_STATE) comes before a byte is sent. options NULL: one by one. */
LST_API lst_status_t lst_update(lst_t *lst, const lst_tensor_t *tensors, size_t n,
                                const lst_update_options_t *options);
/* A whole session in one call, without lst_init_*, lst_start and lst_finish: every rank loads the
 * checkpoint in `directory`, an absolute path that all of them see and may load from. version NULL:
 * the directory's name. timeout_s 0: 600. */
LST_API lst_status_t lst_update_disk(lst_t *lst, const char *directory, const char *version,
                                     double timeout_s);
/* Publishes what was sent, on all ranks or on none. version NULL keeps the old label. */
LST_API lst_status_t lst_finish(lst_t *lst, const char *version);
/* Harmless when nothing is open. */
LST_API lst_status_t lst_abort(lst_t *lst);
LST_API lst_status_t lst_set_version(lst_t *lst, const char *version);

typedef struct {
    unsigned rank;
    bool dirty; /* holds part of a failed update and refuses to generate */
    uint64_t epoch;
    char version[257];
    char digest[33]; /* of all weights */
    char state[32];
} lst_rank_info_t;

/* Fills at most room entries; *n is the number of ranks. */
LST_API lst_status_t lst_weight_info(lst_t *lst, lst_rank_info_t *out, size_t room, size_t *n);

/* The digest that every rank has once exactly these tensors (a whole model) are its weights: 32 hex
 * digits and a NUL. Needs lst_init_*, whose answer says how ranks store values. */
LST_API lst_status_t lst_digest(lst_t *lst, const lst_tensor_t *tensors, size_t n, char out[33]);

typedef struct {
    uint64_t updates;  /* successful lst_update calls */
    uint64_t bytes;    /* payload sent, all ranks together */
    double transfer_s; /* time inside lst_update, all together */
    double last_transfer_s;
    uint64_t last_bytes;
    double last_pause_window_s; /* from the start of lst_pause to the end of lst_resume */
} lst_stats_t;
LST_API void lst_stats(const lst_t *lst, lst_stats_t *out);

/* The cluster's answer to the last update_weights that succeeded, as JSON: per rank also what its
 * transfer engine says of it, such as where the time went ("{}" before the first, or out of
 * memory). Valid until the next call of this library. */
LST_API const char *lst_update_reply(lst_t *lst);

/* ---- anything else ---- */

/* Any call of the trainer socket by its name, with a JSON object of arguments (NULL: none). *reply
 * (which may be NULL) is the answer's JSON, valid until the next call. */
LST_API lst_status_t lst_call(lst_t *lst, const char *call, const char *args, const char **reply);

/* ---- checkpoints ---- */

typedef struct lst_checkpoint lst_checkpoint_t;

/* Maps a Hugging Face directory (model.safetensors, or several files with an index) or one
 * .safetensors file. */
LST_API lst_status_t lst_checkpoint_open(const char *path, lst_checkpoint_t **out, char *err,
                                         size_t err_size);
/* Valid until lst_checkpoint_close; data is read-only and may be unaligned. */
LST_API const lst_tensor_t *lst_checkpoint_tensors(const lst_checkpoint_t *self, size_t *n);
LST_API void lst_checkpoint_close(lst_checkpoint_t **self_p);

#ifdef __cplusplus
}
#endif

#endif
